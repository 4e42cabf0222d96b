"""The verb `resume` on the fake Slurm: only what is missing runs again, and nothing twice."""

import shutil
import threading
import time

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401
from slurm_runs import Run, apart_fixture, run_fixture, store_fixture  # noqa: F401
from test_cli import orchestrate

from orchestrator.cluster.jobs import claim
from orchestrator.config.planning import Plan
from orchestrator.store import read_json, write_json
from orchestrator.verbs import resume

Capture = pytest.CaptureFixture[str]


def again(run: Run) -> int:
    return orchestrate("resume", run.folder.name, f"store={run.store.root}")


def test_only_what_is_missing_runs_again(cluster: Cluster, run: Run, capsys: Capture) -> None:
    run.look()
    run.finish(0)
    run.finish(1, "rank_failed")
    run.finish(2, "time_limit")
    cluster.change("100", states=["COMPLETED"] * 3)
    assert run.look().is_over
    write_json(run.folder / "verdict.json", {"verdict": "ERROR", "counts": {}})
    cluster.calls()
    assert again(run) == 0
    said = capsys.readouterr().out
    assert "with new budgets: 1 time_limit" in said
    assert "cells 3, to run 1" in said
    assert "ERROR 1, PASS 1, SUBMITTED 1" in said
    assert run.count() == [1, 1, 2]
    assert not (run.folder / "verdict.json").exists(), "it is not that of all cells any more"
    assert again(run) == 0
    assert run.count() == [1, 1, 2]
    assert cluster.calls().count("sbatch") == 1
    run.finish(2)
    assert again(run) == 3, "the cell with the defect"
    verdict = read_json(run.folder / "verdict.json")
    assert verdict["counts"] == {"PASS": 2, "ERROR": 1}
    assert [cell["attempts"] for cell in verdict["cells"]] == [1, 1, 2]


def test_what_was_measured_elsewhere_meanwhile_is_reused(cluster: Cluster, run: Run, apart: Plan) -> None:
    run.look()
    for cell in range(3):
        run.finish(cell, "time_limit")
    cluster.change("100", states=["FAILED"] * 3)
    assert run.look().is_over
    other = Run(run.store, apart)
    other.look()
    for cell in range(3):
        other.finish(cell)
    assert again(run) == 0
    assert run.count() == [2, 2, 2]


def test_a_cancelled_attempt_ends_first(cluster: Cluster, run: Run, capsys: Capture) -> None:
    """It runs on for a moment after `cancel` has returned."""
    run.look()
    claim(run.attempt(0), {})
    cluster.change("100", states=["RUNNING", "PENDING", "PENDING"])
    assert orchestrate("cancel", run.folder.name, f"store={run.store.root}") == 0
    cluster.change("100", states=["COMPLETING", "CANCELLED", "CANCELLED"])

    def end() -> None:
        time.sleep(2.0)
        run.finish(0, "cancelled")

    ending = threading.Thread(target=end)
    ending.start()
    assert again(run) == 0
    ending.join()
    assert f"waiting for the end of 1 cancelled: {run.names[0][:12]}" in capsys.readouterr().out
    assert run.count() == [2, 2, 2]


def test_one_that_does_not_end_is_said(
    cluster: Cluster, run: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.look()
    claim(run.attempt(0), {})
    cluster.change("100", states=["RUNNING", "PENDING", "PENDING"])
    assert orchestrate("cancel", run.folder.name, f"store={run.store.root}") == 0
    monkeypatch.setattr(resume, "ENDING_S", -59.0)
    assert again(run) == 2
    assert "was cancelled and has not ended within 1 s" in capsys.readouterr().err
    assert run.count() == [1, 1, 1]


def test_other_code_than_was_planned_is_refused(run: Run, capsys: Capture) -> None:
    for name, cell in run.experiment.cells.items():
        code = {**cell["code"], "candidate": {**cell["code"]["candidate"], "source": "what it was"}}
        write_json(run.store.cell_dir(name) / "cell.json", {**cell, "code": code})
    assert again(run) == 2
    assert "have changed since" in capsys.readouterr().err
    assert run.count() == [0, 0, 0]
    (run.store.root / "trees" / "what it was").mkdir(parents=True)
    assert again(run) == 0, "a copy of what it was is kept in the store"
    assert run.count() == [1, 1, 1]


def test_an_attempt_whose_folder_was_removed_runs_again(cluster: Cluster, run: Run) -> None:
    run.look()
    for cell in range(3):
        run.finish(cell)
    shutil.rmtree(run.attempt(1))
    cluster.change("100", states=["COMPLETED"] * 3)
    assert again(run) == 0
    assert run.count() == [1, 1, 1]
    assert run.store.result(run.attempt(1)) is None


def test_a_run_on_slurm_is_resumed_where_slurm_is(
    cluster: Cluster, run: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert again(run) == 2
    assert "sbatch is not on the PATH: resume the run from a login node" in capsys.readouterr().err
