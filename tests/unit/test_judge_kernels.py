"""What the records of kernels lead to: a line for each fallback and each difference, a failure for ids of no expert."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judge_fixtures import World, check, codes, write

from orchestrator.judge.policy import combine
from orchestrator.report.table import print_table

OBSERVATIONS = ("started", "updated", "repeated", "back")
FAST = {"kernel": "hopper_mega_moe", "reason": "compute capability 9.0, mxfp4 experts", "fallback": False}
SLOW = {"kernel": "mega_moe_reference", "reason": "no nvcc is on the PATH", "fallback": True}
Damage = Callable[[Path], None]


def layers(rank: int, **values: Any) -> list[dict[str, Any]]:
    """Records of one rank: experts in one layer of the target and in the drafter."""
    known = {"kind": "moe_layer", "rank": rank, "experts": 2, "invalid_ids": 0, "folded_groups": 0, **FAST}
    modules = (("target", "model.layers.1.mlp.experts"), ("draft", "mtp.0.mlp.experts"))
    return [{**known, "root": root, "module": module, **values} for root, module in modules]


def served(arm: str = "candidate", observations: tuple[str, ...] = OBSERVATIONS, **values: Any) -> Damage:
    """What all ranks of an arm record in some observations."""

    def record(attempt: Path) -> None:
        for observation in observations:
            for rank in range(4):
                path = attempt / arm / observation / f"kernels-{rank:05d}.jsonl"
                write(path, [*layers(rank, **values), {"kind": "end"}])

    return record


def fresh(attempt: Path, **values: Any) -> None:
    for checkpoint in ("old", "new"):
        folder = attempt.parents[2] / "references" / f"key-{checkpoint}" / "fresh"
        for rank in range(4):
            write(folder / f"kernels-{rank:05d}.jsonl", [*layers(rank, **values), {"kind": "end"}])


def all_of(*damages: Damage) -> Damage:
    def record(attempt: Path) -> None:
        for damage in damages:
            damage(attempt)

    return record


def printed(result: dict[str, Any]) -> str:
    out = io.StringIO()
    print_table(combine([result]), out, 100)
    return " ".join(out.getvalue().split())


def informative(result: dict[str, Any]) -> set[str]:
    return {c["name"] for c in result["checks"]} & {"fast_kernel", "exact_weights", "same_kernels"}


def test_a_fast_kernel_on_all_sides_is_one_check_more(tmp_path: Path) -> None:
    result = World().judge(tmp_path, all_of(served(), fresh))
    entry = check(result, "gate:kernels")
    assert (result["verdict"], entry["verdict"], entry["required"]) == ("PASS", "PASS", True)
    assert entry["observed"] == "hopper_mega_moe in 2 layers (compute capability 9.0, mxfp4 experts)"
    assert informative(result) == set()


def test_records_from_before_say_nothing(tmp_path: Path) -> None:
    result = World().judge(tmp_path)
    assert "gate:kernels" not in {c["name"] for c in result["checks"]}
    assert result["verdict"] == "PASS"


def test_a_fallback_is_told_with_its_reason_and_does_not_decide(tmp_path: Path) -> None:
    result = World().judge(tmp_path, all_of(served(**SLOW), lambda attempt: fresh(attempt, **SLOW)))
    entry = check(result, "fast_kernel")
    assert (result["verdict"], entry["verdict"], entry["required"]) == ("PASS", "NOT_RUN", False)
    assert informative(result) == {"fast_kernel"}
    assert "mega_moe_reference in 2 layers (no nvcc is on the PATH)" in printed(result)


def test_a_side_served_by_another_kernel_is_told(tmp_path: Path) -> None:
    result = World(base=True).judge(tmp_path, all_of(served(), served("base", **SLOW), fresh))
    told = check(result, "same_kernels")
    assert (result["verdict"], told["required"]) == ("PASS", False)
    assert "`base`: mega_moe_reference in 2 layers" in told["observed"]
    assert "fresh" not in told["observed"]
    assert "may be their kernels' doing" in printed(result)
    assert check(result, "base/fast_kernel")["verdict"] == "NOT_RUN"


def test_a_reference_of_another_kernel_or_of_none_on_record_is_told(tmp_path: Path) -> None:
    result = World().judge(tmp_path / "other", all_of(served(), lambda attempt: fresh(attempt, **SLOW)))
    assert "`fresh.new`: mega_moe_reference in 2 layers" in check(result, "same_kernels")["observed"]
    result = World().judge(tmp_path / "none", served())
    assert "`fresh.new`: not recorded" in check(result, "same_kernels")["observed"]


def test_folded_exponents_are_a_line(tmp_path: Path) -> None:
    result = World().judge(tmp_path, all_of(served(folded_groups=3), fresh))
    assert result["verdict"] == "PASS"
    assert "24 groups of 32 weights lie more than 26 octaves below" in printed(result)


def test_ids_of_no_expert_fail_the_cell_and_are_blamed_where_they_came(tmp_path: Path) -> None:
    later = served(observations=("updated", "repeated", "back"), invalid_ids=5)
    result = World().judge(tmp_path, all_of(served(), later, fresh))
    entry = check(result, "gate:kernels")
    assert (result["verdict"], entry["verdict"]) == ("FAIL", "FAIL")
    assert entry["observed"].startswith(
        "40 choices are neither an expert nor -1, ranks 0-3; hopper_mega_moe in 2"
    )
    assert codes(result) == ["invalid_ids", "invalid_ids"]  # of the target and of the drafter
    finding = result["findings"][0]
    assert (finding["observation"], finding["path"]) == ("updated", "target:model.layers.1.mlp.experts")
    assert "E.g. rank 0, `target:model.layers.1.mlp.experts`: 5 choices." in finding["detail"]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_without_its_file_is_an_error(tmp_path: Path, rank: int) -> None:
    def lost(attempt: Path) -> None:
        (attempt / "candidate" / "updated" / f"kernels-{rank:05d}.jsonl").unlink()

    result = World().judge(tmp_path, all_of(served(), fresh, lost))
    assert result["verdict"] == "ERROR"
    assert f"rank {rank} wrote none" in check(result, "gate:records")["observed"]
