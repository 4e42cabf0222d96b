"""The verb `logs`: the driver, one rank, all of them, while they write; of the attempt and cell that were meant."""

import functools
import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401
from slurm_runs import Run, apart_fixture, run_fixture, store_fixture  # noqa: F401
from test_cli import orchestrate

from orchestrator.cell import references
from orchestrator.cluster import slurm
from orchestrator.cluster.jobs import Book
from orchestrator.provenance import checkout
from orchestrator.store import write_json
from orchestrator.verbs import logs as verb

Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="written")
def written_fixture(run: Run) -> Run:
    """Cell 0 has a job whose driver and ranks have written."""
    run.look()
    attempt = run.attempt()
    task = Book(run.store).task(attempt)
    assert task is not None
    assert task.output is not None
    task.output.write_text("set up\n")
    (attempt / "driver.log").write_text("preflight\n")
    for gang in ("base", "candidate"):
        (attempt / gang).mkdir()
        for rank in range(2):
            (attempt / gang / f"rank-0000{rank}.log").write_text(f"{gang} {rank}\nlast {rank}")
    (attempt / "candidate" / "node-1.log").write_text("srun: slow\n")
    (attempt / "candidate" / "other.log").write_text("not ours\n")
    return run


def logs(run: Run, *words: str) -> int:
    return orchestrate("logs", run.folder.name, *words, f"store={run.store.root}")


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([], ["job | set up", "driver | preflight"]),
        (["--rank", "1", "--arm", "candidate"], ["candidate 1", "last 1"]),
        (
            ["--rank", "1"],
            ["base/rank-00001 | base 1", "base/rank-00001 | last 1", "candidate/rank-00001 | candidate 1",
             "candidate/rank-00001 | last 1"],
        ),
        (
            ["--arm", "candidate"],
            ["candidate/node-1 | srun: slow", "candidate/rank-00000 | candidate 0", "candidate/rank-00000 | last 0",
             "candidate/rank-00001 | candidate 1", "candidate/rank-00001 | last 1"],
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_shown(
    words: Sequence[str], lines: Sequence[str], written: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.verbs.logs._refuse_absent", lambda *_: None)  # the toy has one arm
    assert logs(written, written.names[0][:8], *words) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == lines
    assert said.err == f"{written.names[0][:12]} attempt-001: no result yet\n"


def test_all_are_merged_with_those_of_a_fresh_start_that_has_moved(written: Run, capsys: Capture) -> None:
    attempt, cell = written.attempt(), written.experiment.cells[written.names[0]]
    reference = next(iter(references(cell)))
    folder = written.store.references / reference.key
    folder.mkdir()
    (folder / "rank-00000.log").write_text("fresh\n")
    write_json(folder / "reference.json", {"attempt": f"{attempt.parent.name}/{attempt.name}"})
    written.finish(0, "rank_failed")
    assert logs(written, written.names[0][:8], "--rank", "all") == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == ["job | set up", "driver | preflight"]
    assert f"{reference.name}/rank-00000 | fresh" in said.out
    assert "candidate/rank-00001 | last 1" in said.out
    assert "not ours" not in said.out
    assert said.err.endswith("attempt-001: ERROR rank_failed: It broke.\n")
    write_json(folder / "reference.json", {"attempt": "of/another"})
    logs(written, written.names[0][:8], "--rank", "all")
    assert "fresh" not in capsys.readouterr().out


def test_the_cell_must_be_clear(written: Run, capsys: Capture) -> None:
    assert logs(written) == 2
    said = capsys.readouterr().err
    assert "has 3 cells; say which one" in said
    assert [line.split() for line in said.splitlines()[1:]] == [
        [name[:12], str(seed)] for seed, name in enumerate(written.names, 1)
    ]
    assert logs(written, "cold") == 2
    assert "'cold' means 3 cells" in capsys.readouterr().err
    assert logs(written, "9") == 2
    assert "has no cell '9'" in capsys.readouterr().err
    assert logs(written, "cold", "1") == 0, "a label beside one that all have"


def test_what_no_attempt_can_have_is_refused(written: Run, capsys: Capture) -> None:
    assert logs(written, "1", "--rank", "99") == 2
    assert "--rank 99: the cell has ranks 0 to " in capsys.readouterr().err
    assert logs(written, "1", "--arm", "base") == 2
    assert "--arm base: the cell has one arm" in capsys.readouterr().err


def test_attempts_that_are_not_there(run: Run, capsys: Capture) -> None:
    assert logs(run, "1") == 2
    assert "There is no attempt at cell" in capsys.readouterr().err
    run.look()
    assert logs(run, "1") == 0
    assert "nothing was written; no result yet" in capsys.readouterr().err
    index = run.folder / "cells.json"
    index.write_text(index.read_text().replace('"attempt": null', '"attempt": "attempt-001"'))
    shutil.rmtree(run.attempt())
    assert logs(run, "1") == 2
    assert "attempt-001 is not there any more" in capsys.readouterr().err


def heed_ctrl_c() -> None:
    """A suite that runs in the background of a shell ignores SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def follow(run: Run, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [
        sys.executable,
        "-m",
        "orchestrator",
        "logs",
        run.folder.name,
        run.names[0][:8],
        "--follow",
        *words,
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, f"store={run.store.root}"],
        cwd=checkout(), stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_come_as_they_are_written_until_there_is_a_result(written: Run) -> None:
    attempt = written.attempt()
    with follow(written, "--rank", "all") as following:
        assert following.stdout is not None
        seen = [following.stdout.readline() for _ in range(7)]
        assert seen[-1] == "candidate/rank-00001 | candidate 1\n", "its last line has no end yet"
        append(attempt / "candidate" / "rank-00001.log", ", and more\n")
        assert following.stdout.readline() == "candidate/rank-00001 | last 1, and more\n"
        append(attempt / "driver.log", "judging")
        written.finish(0)
        rest, said = following.communicate(timeout=60)
    assert "driver | judging\n" in rest
    assert said.endswith("attempt-001: PASS\n")
    assert following.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_it_can_be_left_at_any_time(number: signal.Signals | None, written: Run) -> None:
    """By Ctrl-C, or by a `| head` that has seen enough."""
    with follow(written) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "job | set up\n"
        if number is not None:
            following.send_signal(number)
        else:
            following.stdout.close()
            deadline = time.monotonic() + 60
            while following.poll() is None and time.monotonic() < deadline:
                append(written.attempt() / "driver.log", "more\n")
                time.sleep(0.2)
        assert following.wait(60) == (130 if number is not None else 141)
        assert following.stderr is not None
        assert following.stderr.read() == ""


def test_a_job_that_died_without_a_result_is_not_waited_for(
    written: Run, cluster: Cluster, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm is asked when nothing is written, seldom, and once more when it has said that the job is over."""
    monkeypatch.setattr(verb, "POLL_S", 0.05)
    monkeypatch.setattr(verb, "QUIET_S", 0.1)
    cell = written.experiment.cells[written.names[0]]
    cell["cluster"]["lost_after_s"] = 0.3
    asked: list[float] = []

    def die(survey: Callable[[Sequence[str]], slurm.Survey], jobs: Sequence[str]) -> slurm.Survey:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise slurm.SlurmError("squeue failed")
        if len(asked) == 4:
            cluster.change("100", states=["FAILED", "RUNNING", "RUNNING"])
        return survey(jobs)

    monkeypatch.setattr(slurm, "survey", functools.partial(die, slurm.survey))
    cluster.change("100", states=["RUNNING"] * 3)
    began = time.monotonic()
    logs_of = verb.Logs(written.store, cell, written.attempt(), None, None)
    verb._show(logs_of, True, sys.stdout)
    assert "job 100_0 is over (Slurm says FAILED) and left no result" in capsys.readouterr().err
    pauses = [after - before for before, after in itertools.pairwise([began, *asked])]
    least = [0.1, 0.2, 0.4, 0.8, 0.3]
    assert len(pauses) == len(least)
    assert all(pause >= wanted for pause, wanted in zip(pauses, least, strict=True))
