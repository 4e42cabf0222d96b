"""The verb `cancel`: what is ours ends, what is not is left alone, and nobody tries it again but who resumes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401
from slurm_runs import Run, apart_fixture, run_fixture, store_fixture  # noqa: F401
from test_cli import orchestrate

from orchestrator import here
from orchestrator.cluster import cancelled
from orchestrator.cluster.jobs import CLAIM, Book, claim
from orchestrator.failure import Failure
from orchestrator.provenance import checkout
from orchestrator.store import Store, read_json, write_json

Capture = pytest.CaptureFixture[str]


def cancel(run: Run, capsys: Capture, *words: str) -> tuple[int, str]:
    """Its exit code, and what it said in one line."""
    code = orchestrate("cancel", run.folder.name, *words, f"store={run.store.root}")
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def ends(run: Run) -> list[str]:
    results = [run.store.result(run.attempt(cell)) for cell in range(len(run.names))]
    return [r["error"]["type"] if r and r["error"] else (r["verdict"] if r else "none") for r in results]


def test_what_waits_is_ended_job_by_job_and_stays_so(cluster: Cluster, run: Run, capsys: Capture) -> None:
    run.look()
    run.finish(1)
    code, said = cancel(run, capsys)
    assert code == 0
    assert cluster.jobs["100"]["states"] == ["CANCELLED", "PENDING", "CANCELLED"], "the other has its result"
    assert "1 cancelled job 100_0, which was PENDING" in said
    assert "2 measured before" in said
    assert ends(run) == ["cancelled", "PASS", "cancelled"]
    assert "Cancelled by " in run.error(0)["message"]
    assert run.error(0)["message"].endswith("It had not begun.")
    assert run.look().is_over
    assert run.count() == [1, 1, 1]
    code, said = cancel(run, capsys)
    assert code == 0
    assert "had ended: cancelled" in said


def test_what_runs_ends_as_its_driver_says_or_as_slurm_does(
    cluster: Cluster, run: Run, capsys: Capture
) -> None:
    run.look()
    for cell in range(2):
        claim(run.attempt(cell), {})
    cluster.change("100", states=["RUNNING", "RUNNING", "PENDING"], nodes="n[1-2]")
    code, said = cancel(run, capsys)
    assert code == 0
    assert "cancelled job 100_1, which was RUNNING on n[1-2]" in said
    assert ends(run) == ["none", "none", "cancelled"]
    failure = cancelled.explained(run.attempt(0), Failure("stopped", "Told to stop.", rank=3, node="n1"))
    assert (failure.type, failure.node, failure.rank) == ("cancelled", None, 3), "no node is at fault"
    assert failure.message.endswith("(stopped: Told to stop.)")
    run.look()
    for cell in range(2):
        run.age(cell, 61.0)
    assert run.look().is_over
    assert ends(run) == ["cancelled"] * 3
    assert run.count() == [1, 1, 1]


def test_an_end_that_nobody_ordered_keeps_its_type(run: Run) -> None:
    run.look()
    failure = Failure("node_lost", "It broke.")
    assert cancelled.explained(run.attempt(), failure) is failure
    cancelled.mark(run.attempt())
    unsupported = Failure("unsupported", "There is no such kernel.")
    assert cancelled.explained(run.attempt(), unsupported) is unsupported


def test_one_cell_may_be_meant(cluster: Cluster, run: Run, capsys: Capture) -> None:
    run.look()
    assert cancel(run, capsys, "2")[0] == 0
    assert cluster.jobs["100"]["states"] == ["PENDING", "CANCELLED", "PENDING"]
    assert cancel(run, capsys, "cold")[0] == 2


def test_a_job_of_somebody_else_with_the_same_id_is_left_alone(
    cluster: Cluster, run: Run, capsys: Capture
) -> None:
    run.look()
    cluster.change("100", comment="", states=["RUNNING"] * 3)
    code, said = cancel(run, capsys)
    assert code == 0
    assert "job 100_0 is gone; another job has its id now, and was left alone" in said
    assert cluster.jobs["100"]["states"] == ["RUNNING"] * 3
    assert "scancel" not in cluster.calls()
    assert ends(run) == ["cancelled"] * 3, "and our attempts will not run"


def test_jobs_that_are_gone_are_no_mistake(cluster: Cluster, run: Run, capsys: Capture) -> None:
    run.look()
    cluster.change("100", states=["COMPLETED", "RUNNING", "RUNNING"])
    assert "job 100_0 is gone (COMPLETED)" in cancel(run, capsys, "1")[1]
    cluster.change("100", gone=True)
    code, said = cancel(run, capsys)
    assert code == 0
    assert "job 100_1 is gone" in said


@pytest.mark.parametrize("is_known", [False, True])
def test_a_batch_whose_submitter_died(cluster: Cluster, run: Run, capsys: Capture, is_known: bool) -> None:
    """Before or after sbatch: nobody noted a job."""
    run.look()
    [record] = run.store.root.glob("jobs/*/submitted.json")
    record.unlink()
    if not is_known:
        cluster.jobs = {}
    code, said = cancel(run, capsys)
    assert code == 0
    if is_known:
        assert cluster.jobs["100"]["states"] == ["CANCELLED"] * 3
    else:
        assert "was never submitted, and will not be" in said
    assert ends(run) == ["cancelled"] * 3
    run.look()
    assert set(cluster.jobs) <= {"100"}


def test_a_slurm_that_does_not_answer(cluster: Cluster, run: Run, capsys: Capture) -> None:
    run.look()
    cluster.fault("squeue", "Unable to contact slurm controller")
    code, said = cancel(run, capsys)
    assert code == 2
    assert "error: squeue failed: Unable to contact" in said
    assert ends(run) == ["none"] * 3, "nothing was changed"
    for cell in range(3):
        run.finish(cell)
    assert cancel(run, capsys)[0] == 0, "there is nothing to ask about"
    for cell in range(3):
        (run.attempt(cell) / "result.json").unlink()
    cluster.fault("squeue", None)
    cluster.fault("scancel", "Socket timed out")
    code, said = cancel(run, capsys)
    assert code == 3
    assert "Jobs may go on: scancel failed: Socket timed out Cancel again." in said
    cluster.fault("scancel", None)
    code, said = cancel(run, capsys)
    assert code == 0
    assert cluster.jobs["100"]["states"] == ["CANCELLED"] * 3


def test_what_would_be_tried_again_or_has_not_been_submitted(
    cluster: Cluster, run: Run, capsys: Capture
) -> None:
    run.look()
    run.finish(0, "node_lost", "n1")
    run.finish(1, "rank_failed")
    cluster.change("100", states=["FAILED"] * 3)
    code, said = cancel(run, capsys)
    assert code == 0
    assert "1 had not begun, and will not" in said
    assert "2 had ended: rank_failed" in said
    assert ends(run) == ["cancelled", "rank_failed", "cancelled"]
    assert run.look().is_over
    assert run.count() == [2, 1, 1]


DRIVER = """
import sys, time
from orchestrator import driver
driver.measure = lambda *_: time.sleep(120)
sys.exit(driver.main(sys.argv[1:]))
"""
RUN = (
    "import sys; from orchestrator import here; real = here.subprocess.Popen;"
    "here.subprocess.Popen = lambda a, **k: real([a[0], sys.argv[1], a[-1]], **k);"
    "from orchestrator.cli import main; main(sys.argv[2:])"
)


@pytest.fixture(name="running")
def running_fixture(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A `run` of two cells on this machine, the first of which is being measured, for ever, by a real driver."""
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-c", RUN, str(tmp_path / "driver.py"), "-m", "load_path=cold,direct"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, f"store={tmp_path / 'runs'}", "cluster.memory_gb=2", "wandb.enabled=false"],
        cwd=checkout(), stdout=pipe, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/cells/*/*/events.jsonl")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process
        process.terminate()


def test_cells_on_this_machine_and_their_resumption(
    running: "subprocess.Popen[str]", tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "runs")
    where = f"store={store.root}"
    assert orchestrate("runs", where) == 0
    assert "1 running, 1 not started" in capsys.readouterr().out
    [attempt] = store.cells.glob("*/attempt-*")
    claimed = read_json(attempt / CLAIM)
    write_json(attempt / CLAIM, {**claimed, "host": "elsewhere"})
    assert orchestrate("cancel", "adhoc", "cold", where) == 3
    assert f"is run by process {claimed['process']} on elsewhere: cancel it there" in capsys.readouterr().out
    with subprocess.Popen(["sleep", "60"]) as other:
        write_json(attempt / CLAIM, {**claimed, "process": other.pid})
        assert orchestrate("cancel", "adhoc", "cold", where) == 0
        assert "its driver has just ended" in capsys.readouterr().out
        assert other.poll() is None, "it is none of ours"
        other.kill()
    assert running.poll() is None
    write_json(attempt / CLAIM, claimed)
    assert orchestrate("cancel", "adhoc", where) == 0
    said = capsys.readouterr().out
    assert f"told its driver to end, process {claimed['process']}" in said
    assert "had not begun, and will not" in said
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 3, out
    results = {path.parent.name: store.result(path) for path in store.cells.glob("*/attempt-*")}
    assert [r["error"]["type"] for r in results.values() if r is not None] == ["cancelled"] * 2
    assert not (max(store.cells.glob("*/attempt-*"), key=lambda p: p != attempt) / "events.jsonl").exists()

    def measure(attempt: Path, _locks: object) -> int:
        result = results[attempt.parent.name]
        assert result is not None
        write_json(
            attempt / "result.json", {**result, "attempt": attempt.name, "verdict": "PASS", "error": None}
        )
        return 0

    monkeypatch.setattr(here, "_drive", measure)
    assert orchestrate("resume", "adhoc", where) == 0
    said = capsys.readouterr().out
    assert "with new budgets: 2 cancelled" in said
    assert "cells 2, to run 2" in said
    assert orchestrate("runs", where) == 0
    assert "2 PASS" in capsys.readouterr().out


def test_a_task_is_of_a_batch(run: Run) -> None:
    """A record of a job that says no batch is of no job."""
    run.look()
    write_json(run.attempt() / "job.json", {"job": "7"})
    assert Book(run.store).task(run.attempt()) is None
