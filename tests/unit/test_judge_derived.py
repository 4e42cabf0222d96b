"""What is derived from weights is held against those that serve beside it, without any reference."""

from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, check, codes

RULE = {"name": "derived_follows", "rule": "derived", "left": "", "right": "", "required": True}


@pytest.fixture
def world() -> World:
    """Whose modules say what `w_uv` follows from."""
    world = World()
    world.cell["load_path"]["checks"].append(RULE)
    for audit in world.candidate.each("started", "updated", "repeated", "back"):
        audit.tensors[fx.W_UV]["follows"] = audit.tensors[fx.W_UV]["fp"]
    return world


def test_what_follows_from_its_weights_passes(world: World, tmp_path: Path) -> None:
    result = world.judge(tmp_path)
    entry = check(result, "derived_follows")
    assert (result["verdict"], entry["verdict"]) == ("PASS", "PASS")
    assert entry["counts"] == {"right": 16}  # four observations of four ranks


def test_it_decides_nothing_where_no_module_says_what_follows(tmp_path: Path) -> None:
    world = World()
    world.cell["load_path"]["checks"].append(RULE)
    result = world.judge(tmp_path)
    entry = check(result, "derived_follows")
    assert (result["verdict"], entry["verdict"], entry["required"]) == ("PASS", "NOT_RUN", False)


def test_what_every_start_makes_wrong_alike_is_found(world: World, tmp_path: Path) -> None:
    gangs = (world.candidate, *world.fresh.values())
    for gang in gangs:
        for observation in gang.audits:
            for audit in gang.each(observation):
                audit.tensors[fx.W_UV] |= {"fp": fx.fp("half", audit.checkpoint, audit.rank % 2)}
    for audit in world.candidate.each("started", "updated", "repeated", "back"):
        audit.tensors[fx.W_UV]["deviation"] = 1.5234
    result = world.judge(tmp_path)
    assert codes(result) == ["wrong_derived"]
    assert "largest absolute difference from what its weights give 1.52" in result["findings"][0]["detail"]
    assert "16 of 16 derived tensors do not follow" in check(result, "derived_follows")["observed"]


@pytest.mark.parametrize(("const", "code"), [(None, "stale"), (255, "uninitialised")])
def test_why_it_does_not_follow(world: World, tmp_path: Path, const: int | None, code: str) -> None:
    started = {audit.rank: audit.tensors[fx.W_UV]["fp"] for audit in world.candidate.each("started")}
    for audit in world.candidate.each("updated", "repeated"):
        audit.tensors[fx.W_UV] |= {
            "fp": started[audit.rank] if const is None else fx.fp("poison"),
            "const": const,
        }
    result = world.judge(tmp_path)
    assert codes(result)[0] == code
    assert check(result, "derived_follows")["verdict"] == "FAIL"
