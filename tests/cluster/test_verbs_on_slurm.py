"""The verbs cancel, resume and logs on the real Slurm, each as the process that an operator starts."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.cluster.jobs import CLAIM
from orchestrator.store import read_json, write_json
from tests.cluster.toy_experiment import ROOT, Toys, control, toys

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("clean")]


def operator(verb: str, run: Toys, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "orchestrator", verb, run.folder.name, *words, f"store={run.store.root}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def said_by(process: "subprocess.Popen[str]", code: int) -> str:
    said, _ = process.communicate(timeout=150)
    assert process.returncode == code, said
    return " ".join(said.split())


def test_two_operators_resume_what_was_cancelled(tmp_path: Path) -> None:
    """One cell waits, two run (one of them outlives its order to end), one is measured: cancel ends the three, and
    two operators who resume at once run each of them once more."""
    made = toys(tmp_path, "load_path=cold", "checkpoints.new.seed=1,2,3,4")
    waiting, held, deaf, measured = range(4)
    made.cells[waiting].cell["cluster"]["partition"] = "debug"
    run = Toys(made, {waiting: ["pass"], held: ["hold", "pass"], deaf: ["deaf", "pass"]})
    control("update", "partition=debug", "state=down")
    try:
        run.look()
        for cell in (held, deaf, measured):
            run.running(cell, 90)
        run.until(lambda run, _: run.ends(measured) == ["PASS"], 60)
        following = operator("logs", run, run.names[held][:12], "--follow")
        said = said_by(operator("cancel", run), 0)
        assert f"cancelled job {run.job(waiting)}, which was PENDING" in said
        assert f"cancelled job {run.job(held)}, which was RUNNING on gb200-" in said
        assert "4 measured before" in said
    finally:
        control("update", "partition=debug", "state=up")
    assert read_json(run.store.attempts(run.names[waiting])[-1] / CLAIM)["job"] is None
    operators = [operator("resume", run, "--watch") for _ in range(2)]
    for one in operators:
        said = said_by(one, 0)
        assert "PASS 4 PASS" in said
    assert [run.ends(cell) for cell in (waiting, held, deaf)] == [["cancelled", "PASS"]] * 3
    assert run.ends(measured) == ["PASS"]
    ran = Counter(line.partition("/")[0] for line in run.ran())
    assert [ran[run.names[cell]] for cell in range(4)] == [1, 2, 2, 1]
    assert run.each_once()
    assert "Cancelled by " in said_by(following, 0)


def test_a_job_of_somebody_else_that_has_our_id_now(tmp_path: Path) -> None:
    """As after Slurm has begun its ids anew: the record names a job that is not ours."""
    made = toys(tmp_path, "load_path=cold")
    made.cells[0].cell["cluster"]["partition"] = "debug"
    run = Toys(made, {})
    control("update", "partition=debug", "state=down")
    try:
        run.look()
        subprocess.run(["scancel", run.job(0)], check=True, timeout=30)
    finally:
        control("update", "partition=debug", "state=up")
    command = ["sbatch", "--parsable", "--array=0", "--output=/dev/null", "--wrap", "sleep 60"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    other = done.stdout.strip()
    try:
        [record] = run.store.root.glob("jobs/*/submitted.json")
        write_json(record, {**read_json(record), "job": other})
        said = said_by(operator("cancel", run), 0)
        assert f"job {other}_0 is gone; another job has its id now, and was left alone" in said
        asked = ["squeue", "--noheader", f"--jobs={other}", "--format=%T"]
        shown = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
        assert shown.stdout.strip() in ("PENDING", "RUNNING")
    finally:
        subprocess.run(["scancel", other], check=True, timeout=30)
