"""The run verb: only what is missing runs, every end leaves a result, the exit code is the verdict's."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator import experiment, here
from orchestrator.cli import main
from orchestrator.failure import Failure
from orchestrator.gangs.signs import STANDING
from orchestrator.provenance import checkout
from orchestrator.result import unjudged
from orchestrator.store import Store, read_json, write_json

SWEEP = ["-m", "load_path=cold,direct", "cluster.memory_gb=2"]


class Driver:
    """Stands in for `orchestrator.driver`: writes `verdicts` one after the other, then PASS."""

    def __init__(self) -> None:
        self.attempts: list[Path] = []
        self.verdicts: list[str | None] = []
        self.failure = "rank_failed"  # type of what is no PASS
        self.before: Callable[[Path], None] = lambda attempt: None

    def __call__(self, attempt: Path, locks: Sequence[int]) -> int:
        self.attempts.append(attempt)
        self.before(attempt)
        verdict = self.verdicts.pop(0) if self.verdicts else "PASS"
        if verdict is None:
            return -signal.SIGKILL
        cell = read_json(attempt.parent / "cell.json")
        result = unjudged(
            cell, attempt.parent.name, attempt.name, verdict, Failure(self.failure, "It broke.")
        )
        write_json(attempt / "result.json", {**result, **({} if verdict == "ERROR" else {"error": None})})
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(here, "_drive", made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def orchestrate(store: Store, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, f"store={store.root}"])
    return int(str(ended.value.code))


def verdict(store: Store) -> dict[str, Any]:
    newest = max(store.experiments.iterdir(), key=lambda folder: (folder / "cells.json").stat().st_mtime_ns)
    return dict(json.loads((newest / "verdict.json").read_text()))


def test_a_run_leaves_verdict_and_reports(
    driver: Driver, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orchestrate(store, *SWEEP) == 0
    [folder] = store.experiments.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "cells.json",
        "verdict.json",
        "report.md",
        "report.html",
    }
    assert [attempt.name for attempt in driver.attempts] == ["attempt-001", "attempt-001"]
    found = verdict(store)
    assert (found["verdict"], found["counts"], found["experiment"]) == ("PASS", {"PASS": 2}, folder.name)
    assert [cell["labels"]["load_path"] for cell in found["cells"]] == ["cold", "direct"]
    out = capsys.readouterr().out
    assert "PASS" in out
    assert str(folder / "report.html") in out


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["PASS", "FAIL"], 1),
        (["ERROR", "PASS"], 3),
        (["ERROR", "FAIL"], 1),
        (["NOT_RUN", "PASS"], 4),
        (["INCONCLUSIVE", "PASS"], 4),
        ([None, "PASS"], 3),
    ],
)
def test_exit_codes(driver: Driver, store: Store, verdicts: list[str | None], code: int) -> None:
    driver.verdicts = verdicts
    assert orchestrate(store, *SWEEP) == code
    assert verdict(store)["exit_code"] == code


def test_a_driver_that_dies_leaves_a_typed_error(driver: Driver, store: Store) -> None:
    driver.verdicts = [None]
    assert orchestrate(store, "cluster.memory_gb=2") == 3
    result = store.result(driver.attempts[0])
    assert result is not None
    assert result["error"]["type"] == "lost"
    assert "The driver was ended by signal SIGKILL and left no result.json" in result["error"]["message"]


@pytest.mark.parametrize(
    ("failure", "kind", "attempts"),
    [
        ("node_lost", "ray", 3),
        ("connection_lost", "ray", 2),
        ("rank_failed", "ray", 1),
        ("node_lost", "local", 1),
    ],
)
def test_what_a_ray_cluster_broke_is_tried_again(
    failure: str, kind: str, attempts: int, driver: Driver, store: Store
) -> None:
    """As often as the budget of the failure's type allows; then the next cell has its turn."""
    driver.failure, driver.verdicts = failure, ["ERROR"] * attempts
    assert orchestrate(store, *SWEEP, f"cluster={kind}") == 3
    assert [int(attempt.name[-3:]) for attempt in driver.attempts] == [*range(1, attempts + 1), 1]
    assert verdict(store)["counts"] == {"ERROR": 1, "PASS": 1}


def test_finished_cells_are_reused_and_errors_tried_again(driver: Driver, store: Store) -> None:
    driver.verdicts = ["ERROR", "FAIL"]
    assert orchestrate(store, *SWEEP) == 1
    assert orchestrate(store, *SWEEP) == 1
    assert [attempt.name for attempt in driver.attempts] == ["attempt-001", "attempt-001", "attempt-002"]
    assert {cell["verdict"] for cell in verdict(store)["cells"]} == {"PASS", "FAIL"}
    assert orchestrate(store, *SWEEP, "rerun=true") == 0
    assert len(driver.attempts) == 5


def test_the_attempt_of_this_run_counts_and_not_a_later_one(driver: Driver, store: Store) -> None:
    assert orchestrate(store, "cluster.memory_gb=2", "name=first") == 0
    driver.verdicts = ["ERROR"]
    assert orchestrate(store, "cluster.memory_gb=2", "name=second", "rerun=true") == 3
    assert orchestrate(store, "cluster.memory_gb=2", "name=third") == 0, (
        "the measurement, not the later error"
    )
    assert orchestrate(store, "report", "first") == 0
    assert orchestrate(store, "report", "second") == 3


def test_a_reused_cell_bears_the_labels_of_its_experiment(driver: Driver, store: Store) -> None:
    assert orchestrate(store, "cluster.memory_gb=2") == 0
    assert orchestrate(store, "-m", "cluster.memory_gb=2", "checkpoints.old.seed=0,1") == 0
    assert [cell["labels"]["checkpoints.old.seed"] for cell in verdict(store)["cells"]] == ["0", "1"]
    assert len(driver.attempts) == 2


def test_nothing_runs_on_a_store_that_cannot_be_written(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert orchestrate(Store(tmp_path / "file" / "runs"), "cluster.memory_gb=2") == 2
    assert driver.attempts == []
    assert "cannot be written" in capsys.readouterr().err


def test_a_cell_that_runs_elsewhere_is_refused_before_anything_runs(
    driver: Driver, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def start_a_second_one(attempt: Path) -> None:
        driver.before = lambda _: None
        assert orchestrate(store, *SWEEP) == 2

    driver.before = start_a_second_one
    assert orchestrate(store, *SWEEP) == 0
    assert len(driver.attempts) == 2
    assert f"is being run by process {os.getpid()} on" in capsys.readouterr().err


@pytest.mark.parametrize(("verdict_", "code"), [("PASS", 0), ("ERROR", 3)])
def test_a_cell_that_somebody_measures_or_cancels_meanwhile_is_not_run(
    driver: Driver, store: Store, verdict_: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def meanwhile(attempt: Path) -> None:
        driver.before = lambda _: None
        [name] = {path.name for path in store.cells.iterdir()} - {attempt.parent.name}
        other = store.new_attempt(name)
        result = unjudged(
            read_json(other.parent / "cell.json"), name, other.name, verdict_, Failure("cancelled", "x")
        )
        write_json(other / "result.json", {**result, **({} if verdict_ == "ERROR" else {"error": None})})

    driver.before = meanwhile
    assert orchestrate(store, *SWEEP) == code
    assert len(driver.attempts) == 1
    assert "another operator has measured or cancelled it meanwhile" in capsys.readouterr().out
    assert verdict(store)["counts"] == ({"PASS": 2} if code == 0 else {"PASS": 1, "ERROR": 1})


def test_an_interrupted_run_keeps_what_is_finished(
    driver: Driver, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(attempt: Path) -> None:
        if len(driver.attempts) == 2:
            raise KeyboardInterrupt

    driver.before = interrupt
    assert orchestrate(store, *SWEEP) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    driver.before = lambda _: None
    assert orchestrate(store, "report", "adhoc") == 4
    assert [cell["verdict"] for cell in verdict(store)["cells"]] == ["PASS", "NOT_RUN"]
    assert orchestrate(store, *SWEEP) == 0
    assert len(driver.attempts) == 3


def test_a_defect_of_ours_is_not_called_a_failure_of_theirs(
    driver: Driver, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def defect(attempt: Path) -> None:
        raise ZeroDivisionError

    driver.before = defect
    assert orchestrate(store, "cluster.memory_gb=2") == 3, "1 would say FAIL"


SLEEPER = """
import signal, sys, time
from pathlib import Path
def stop(*_):
    Path(sys.argv[1], "stopped").touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
Path(sys.argv[1], "started").touch()
time.sleep(60)
"""


def _heed_ctrl_c() -> None:
    """A suite that runs in the background of a shell ignores SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_driver_first(number: signal.Signals, tmp_path: Path) -> None:
    """With a real orchestrator process, whose driver is a script that notes how it was ended."""
    (tmp_path / "orchestrator_driver_stub.py").write_text(SLEEPER)
    code = (
        "import sys; from pathlib import Path; from orchestrator import here; real = here.subprocess.Popen;"
        "here.subprocess.Popen = lambda a, **k: real([a[0], sys.argv[1], a[-1]], **k);"
        "from orchestrator.cli import main; main(sys.argv[2:])"
    )
    stub = str(tmp_path / "orchestrator_driver_stub.py")
    command = [sys.executable, "-c", code, stub, f"store={tmp_path / 'runs'}", "cluster.memory_gb=2"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=checkout(), stderr=pipe, stdout=pipe, preexec_fn=_heed_ctrl_c) as run:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/cells/*/*/started")):
            assert time.monotonic() < deadline, "the driver never started"
            assert run.poll() is None, run.communicate()[1].decode()
            time.sleep(0.05)
        run.send_signal(number)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert b"Interrupted" in err
    assert list(tmp_path.glob("runs/cells/*/*/stopped"))


def test_status_says_what_cells_are_doing(
    driver: Driver, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(attempt: Path) -> None:
        standing = {"gang": "candidate", "step": "2/3 update new", "rank": 6, "node": "n1", "silent_s": 41.2}
        write_json(attempt / STANDING, standing)
        assert orchestrate(store, "status") == 0

    driver.before = look
    driver.verdicts = ["ERROR"]
    orchestrate(store, *SWEEP)
    out = capsys.readouterr().out
    said = " ".join(out.replace("│", " ").split())
    assert "running since" in said
    assert "update new, rank 6 on n1, silent for 41 s" in said
    assert "not started" in out
    assert orchestrate(store, "status", "adhoc") == 0
    assert "ERROR (rank_failed)" in capsys.readouterr().out


def test_judging_again_uses_the_records(
    driver: Driver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert orchestrate(store, "cluster.memory_gb=2") == 0
    [attempt] = driver.attempts
    seen, before = [], store.result(attempt)
    assert before is not None

    def stricter(cell: Any, folder: Path, references: dict[str, Path]) -> dict[str, Any]:
        seen.append((folder, set(references)))
        records_know = {"verdict": "FAIL", "starts": before["starts"] + 1, "seconds": 0.0}
        return {**json.loads((folder / "result.json").read_text()), **records_know}

    monkeypatch.setattr(experiment, "judge_attempt", stricter)
    assert orchestrate(store, "judge", "adhoc") == 1
    assert seen == [(attempt, {"fresh.old", "fresh.new"})]
    result = store.result(attempt)
    assert result is not None
    assert result["verdict"] == "FAIL"
    assert (result["starts"], result["seconds"]) == (before["starts"], before["seconds"])
    assert orchestrate(store, "report", "adhoc") == 1
