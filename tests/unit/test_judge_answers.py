"""GSM8K and throughput: what may decide, what may only be shown."""

from pathlib import Path
from typing import Any

import judge_fixtures as fx
import pytest
from judge_fixtures import World, check

from orchestrator.judge.statistics import not_worse, paired, spread


def answers(count: int, wrong: set[int]) -> list[fx.Record]:
    return [
        {
            "kind": "generation", "id": f"gsm8k-{i:05d}", "token_ids": [i, i in wrong], "top_logprobs": [],
            "text": f"#### {i + (i in wrong)}",
        }
        for i in range(count)
    ]  # fmt: skip


def leave_out_questions(world: World) -> None:
    """As a cell is frozen where no GSM8K is found."""
    world.cell["collect"]["gsm8k"]["path"] = None
    world.candidate.gsm8k = {}
    for step in world.cell["load_path"]["steps"]:
        step["collect"] = [name for name in step.get("collect", []) if name != "gsm8k"]


def judged(tmp_path: Path, count: int, ours: set[int], theirs: set[int], real: bool = True) -> fx.Record:
    world = World(real=real)
    world.questions = count
    world.candidate.gsm8k["updated"] = answers(count, ours)
    world.fresh["new"].gsm8k["fresh"] = answers(count, theirs)
    return world.judge(tmp_path)


def test_equal_answers_of_a_real_model_pass(tmp_path: Path) -> None:
    result = judged(tmp_path, 1319, set(range(60)), set(range(60)))
    entry = check(result, "accuracy")
    assert entry["verdict"] == "PASS"
    assert entry["required"]
    assert entry["counts"]["right"] == 1259
    assert entry["counts"]["p"] == 1.0
    assert "1259 of 1319 right, 1259 for `fresh.new`" in entry["observed"]


def test_few_questions_cannot_decide(tmp_path: Path) -> None:
    result = judged(tmp_path, 100, {1, 2}, {3, 4})
    entry = check(result, "accuracy")
    assert entry["verdict"] == "INCONCLUSIVE"
    assert "spans the margin" in entry["observed"]
    assert result["verdict"] != "PASS"


def test_a_real_loss_fails(tmp_path: Path) -> None:
    result = judged(tmp_path, 1319, set(range(120)), set(range(20)))
    assert check(result, "accuracy")["verdict"] == "FAIL"
    assert result["verdict"] == "FAIL"


def test_without_a_counterpart_a_score_decides_nothing(tmp_path: Path) -> None:
    world = World(real=True)
    world.questions = 50
    world.candidate.gsm8k["updated"] = answers(50, set())
    entry = check(world.judge(tmp_path), "accuracy")
    assert entry["verdict"] == "INCONCLUSIVE"
    assert "nothing to pair them with" in entry["observed"]


def test_other_questions_on_the_other_side_are_an_error(tmp_path: Path) -> None:
    world = World(real=True)
    world.questions = 50
    world.candidate.gsm8k["updated"] = answers(50, set())
    world.fresh["new"].gsm8k["fresh"] = answers(49, set())
    assert check(world.judge(tmp_path), "accuracy")["verdict"] == "ERROR"


def test_a_proxy_is_shown_and_never_evidence(tmp_path: Path) -> None:
    result = judged(tmp_path, 8, set(range(8)), set(), real=False)
    entry = check(result, "accuracy")
    assert not entry["required"]
    assert result["verdict"] == "PASS"
    assert "0 of 8 right" in entry["observed"]
    assert "no evidence of accuracy" in entry["caveat"]
    assert "0 of 8 answers are those of `fresh.new`" in entry["observed"]


def test_a_proxy_cannot_be_required_into_evidence(tmp_path: Path) -> None:
    world = World()
    for entry in world.cell["load_path"]["checks"]:
        entry["required"] = True
    result = world.judge(tmp_path)
    assert not check(result, "accuracy")["required"]
    assert not check(result, "speed")["required"]
    assert result["verdict"] == "PASS"


def test_unscorable_without_the_questions(tmp_path: Path) -> None:
    world = World(real=True)
    leave_out_questions(world)
    result = world.judge(tmp_path)
    entry = check(result, "accuracy")
    assert entry["verdict"] == "NOT_RUN"
    assert "collect.gsm8k.path=FOLDER" in entry["caveat"]
    assert result["verdict"] == "NOT_RUN"


def test_a_proxy_without_the_questions_still_passes(tmp_path: Path) -> None:
    world = World()
    leave_out_questions(world)
    result = world.judge(tmp_path)
    assert check(result, "accuracy")["verdict"] == "NOT_RUN"
    assert result["verdict"] == "PASS"


def test_an_unanswered_question_is_an_error(tmp_path: Path) -> None:
    world = World(real=True)
    world.candidate.gsm8k["updated"].pop()
    world.fresh["new"].gsm8k["fresh"] = list(world.candidate.gsm8k["updated"])
    assert check(world.judge(tmp_path), "accuracy")["verdict"] == "ERROR"


def test_solutions_of_other_questions_are_an_error(tmp_path: Path) -> None:
    world = World(real=True)
    world.questions = 3
    assert check(world.judge(tmp_path), "accuracy")["verdict"] == "ERROR"


def test_throughput_is_a_ratio_with_a_caveat(tmp_path: Path) -> None:
    world = World()
    world.fresh["new"].rates["fresh"] = 800.0
    entry = check(world.judge(tmp_path), "speed")
    assert entry["counts"]["ratio"] == pytest.approx(1.25)
    assert "1.250x" in entry["observed"]
    assert "run-to-run noise" in entry["caveat"]
    assert not entry["required"]


def test_arms_are_compared_with_each_other(tmp_path: Path) -> None:
    world = World(base=True)
    assert world.base is not None
    world.base.rates["updated"] = 500.0
    result = world.judge(tmp_path)
    assert check(result, "speed")["counts"]["ratio"] == pytest.approx(2.0)
    assert "`base/updated`" in check(result, "speed")["observed"]


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 * 0.5**5), (8, 2, 2 * (1 + 10 + 45) / 2**10), (6, 6, 1.0)],
)
def test_mcnemar_is_the_exact_binomial(b: int, c: int, p: float) -> None:
    left = [True] * b + [False] * c + [True] * 50
    right = [False] * b + [True] * c + [True] * 50
    assert paired(left, right).p == pytest.approx(p)


def test_paired_difference_and_interval() -> None:
    """Agresti and Min 2005: n* = n + 2, centre (b - c) / n*, variance ((b + c + 1) - (b - c)^2 / n*) / n*^2."""
    left = [True] * 12 + [False] * 4 + [True] * 80 + [False] * 4
    right = [False] * 12 + [True] * 4 + [True] * 80 + [False] * 4
    result = paired(left, right)
    n, d, s = 102, 8, 17
    half = 1.959964 * ((s - d * d / n) ** 0.5) / n
    assert result.difference == pytest.approx(0.08)
    assert (result.low, result.high) == pytest.approx((d / n - half, d / n + half), abs=1e-6)
    assert (result.both, result.left_only, result.right_only, result.neither) == (80, 12, 4, 4)
    assert result.questions == 100


def test_interval_is_no_point_where_nothing_is_discordant() -> None:
    result = paired([True] * 1319, [True] * 1319)
    assert result.low < 0 < result.high
    assert result.high < 0.01


@pytest.mark.parametrize("sides", [([], []), ([True], [True, False])])
def test_pairing_needs_the_same_questions(sides: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="same questions"):
        paired(*sides)


def test_interval_covers_the_truth_at_its_rate() -> None:
    """Coverage by exact enumeration would take minutes; 2,000 seeded draws bound it well enough."""
    import random

    draw = random.Random(5)
    hits = 0
    for _ in range(2000):
        outcomes = draw.choices([(1, 0), (0, 1), (1, 1)], weights=[3, 1, 96], k=300)
        result = paired([bool(a) for a, _ in outcomes], [bool(b) for _, b in outcomes])
        hits += result.low <= 0.02 <= result.high
    assert 0.93 < hits / 2000 < 0.99


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.005, 0.004, "PASS"), (0.02, 0.04, "PASS"), (-0.03, -0.011, "FAIL"), (-0.02, 0.001, "INCONCLUSIVE"),
        (-0.01, 0.01, "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_margin_decides(low: float, high: float, verdict: str) -> None:
    assert not_worse(low, high, 0.01) == verdict


def test_spread_is_unknown_for_one_run() -> None:
    assert spread([5.0]) == (5.0, None)
    assert spread([4.0, 5.0, 6.0]) == (5.0, pytest.approx(0.2))
