"""The candidate's observations held against those of the base arm, which may be another release of the engine."""

from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, check


def versions(rule: str = "equal", left: str = "updated") -> World:
    world = World(base=True)
    world.cell["load_path"]["checks"].append(
        {"name": "as_base", "rule": rule, "left": left, "right": f"base/{left}", "required": True}
    )
    return world


@pytest.mark.parametrize("rule", ["equal", "same_generations"])
@pytest.mark.parametrize("left", ["started", "updated"])
def test_equal_versions_pass_and_the_base_is_not_asked(tmp_path: Path, rule: str, left: str) -> None:
    judged = versions(rule, left).judge(tmp_path)
    assert judged["verdict"] == "PASS"
    assert check(judged, "as_base")["required"]
    assert not [c for c in judged["checks"] if c["name"] == "base/as_base"]


def test_another_tensor_in_the_base_is_found(tmp_path: Path) -> None:
    world = versions()
    assert world.base is not None
    for gang in (world.candidate, *world.fresh.values()):
        for audit in gang.each(*gang.audits):  # the new version computes this one otherwise, always
            audit.tensors[fx.ROPE]["fp"] = fx.fp("rope of the new version")
    for audit in world.base.each(*world.base.audits):
        audit.tensors[fx.ROPE]["fp"] = fx.fp("rope")
    judged = world.judge(tmp_path)
    assert check(judged, "as_base")["verdict"] == "FAIL"
    assert "is that of `base/updated`" in check(judged, "as_base")["expected"]
    assert check(judged, "updated_equals_fresh")["verdict"] == "PASS"
    [finding] = [f for f in judged["findings"] if f["arm"] == "candidate"]
    assert (finding["code"], finding["path"]) == ("differs", fx.ROPE)
    assert "the base version holds other bytes" in finding["detail"]


def test_other_answers_of_the_base_are_found(tmp_path: Path) -> None:
    world = versions("same_generations")
    assert world.base is not None
    world.base.generations["updated"][1]["token_ids"] = [1, 2, 3]
    judged = world.judge(tmp_path)
    assert check(judged, "as_base")["verdict"] == "FAIL"
    assert "Request `p1`" in check(judged, "as_base")["observed"]


def test_records_that_the_base_lacks_are_an_error(tmp_path: Path) -> None:
    judged = versions().judge(tmp_path, lambda a: (a / "base/updated/tensors-00001.jsonl").unlink())
    assert judged["verdict"] == "ERROR"


def test_without_a_base_arm_nothing_is_compared(tmp_path: Path) -> None:
    world = World()
    world.cell["load_path"]["checks"] += versions().cell["load_path"]["checks"][-1:]
    judged = world.judge(tmp_path)
    assert check(judged, "as_base")["verdict"] == "ERROR"
    assert "there is no base arm" in check(judged, "as_base")["observed"]


def again(attempt: Path, arm: str, rate: float) -> None:
    run = {"kind": "run", "requests": 4, "tokens_per_s": rate, "kv_capacity_tokens": 4096}
    fx.write(attempt / f"{arm}.again" / "again" / "throughput.jsonl", [run, {"kind": "end"}])


def test_second_runs_alternate_the_arms(tmp_path: Path) -> None:
    world = World(base=True)
    assert world.base is not None
    world.base.rates["updated"] = 1250.0  # against 1000: 0.8x

    def second(attempt: Path) -> None:
        again(attempt, "candidate", 1250.0)
        again(attempt, "base", 1000.0)

    speed = check(world.judge(tmp_path / "a", second), "speed")
    assert speed["counts"]["ratio"] == pytest.approx(1.0)
    assert speed["counts"]["interval"] == pytest.approx([0.8, 1.25])
    assert "0.800x, and 1.250x when both ran again in turn" in speed["observed"]
    assert "interval" not in check(world.judge(tmp_path / "b"), "speed")["counts"]


def test_a_second_run_without_its_record_is_an_error(tmp_path: Path) -> None:
    def second(attempt: Path) -> None:
        again(attempt, "candidate", 1250.0)
        (attempt / "base.again" / "again").mkdir(parents=True)

    assert World(base=True).judge(tmp_path, second)["verdict"] == "ERROR"
