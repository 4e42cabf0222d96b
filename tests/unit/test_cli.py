"""The command line: help that teaches, sentences for users' mistakes, Hydra's own flags, no traces left."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.cli import VERBS, main
from orchestrator.config.compose import group_options
from orchestrator.provenance import checkout

Capture = pytest.CaptureFixture[str]


def orchestrate(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(str(ended.value.code))


def as_module(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd or checkout(), timeout=120)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["plan", "--help"]])
def test_help_names_verbs_groups_options_and_exit_codes(arguments: Sequence[str], capsys: Capture) -> None:
    assert orchestrate(*arguments) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb} " in text for verb in VERBS)
    unwrapped = re.sub(r"\n {6,}", "", text)  # many options go over several lines
    for group, options in group_options().items():
        assert f"{group}={'|'.join(options)}" in unwrapped
    assert "+exp=kimi_k3_refit" in text
    assert "2 invalid config or usage" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dance"], "'dance' is neither a verb nor an override: the verbs are run, plan,"),
        (["plan", "cold"], "'cold' is neither a verb nor an override"),
        (["plan", "--fast"], "--fast is not an option; see --help."),
        (["plan", "--config-dir", "/nonexistent"], "--config-dir /nonexistent is not a folder."),
        (["plan", "model=foo"], "model=foo is not an option; model is one of"),
        (["plan", "parallelism=single"], "needs expert parallelism"),
        (
            ["submit", "cluster.memory_gb=2"],
            "submit needs a Slurm cluster, and cluster.kind is local: use run.",
        ),
        (["judge", "x", "store=/nonexistent"], "There is no run store at /nonexistent"),
        (["judge", "x", "store='/non existent'"], "There is no run store at /non existent:"),
        (["status", "store=~/runs"], "store=~/runs"),
        (["report", "x", "store=a,b"], "store=a,b names no single folder"),
        (["report", "x", "store="], "store= names no single folder"),
        (
            ["report", "x", "model=kimi_k3"],
            "report knows only store=PATH, not model=: a run keeps the config",
        ),
    ],
)
def test_mistakes_are_sentences(arguments: Sequence[str], sentence: str, capsys: Capture) -> None:
    assert orchestrate(*arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_all_problems_are_counted(capsys: Capture) -> None:
    assert orchestrate("run", "policy.coverage=2", "policy.step_timeout_s=0") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["error:", "error:", "2"]
    assert lines[-1] == "2 problems; nothing was run or submitted."


def test_judge_and_report_need_a_known_run(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "experiments").mkdir()
    assert orchestrate("judge", f"store={tmp_path}") == 2
    assert "judge needs the name of one run" in capsys.readouterr().err
    assert orchestrate("report", "mine", f"store={tmp_path}") == 2
    assert "There is no run 'mine'" in capsys.readouterr().err
    assert orchestrate("status", f"store={tmp_path}") == 0
    assert "No run in" in capsys.readouterr().out


@pytest.mark.parametrize("spelling", ["store='{}'", 'store="{}"', "store={}"])
def test_a_store_is_spelled_as_in_every_override(spelling: str, tmp_path: Path, capsys: Capture) -> None:
    """By who starts commands without a shell, too, which would take the quotes away."""
    (tmp_path / "run store" / "experiments").mkdir(parents=True)
    assert orchestrate("status", spelling.format(tmp_path / "run store")) == 0
    assert f"No run in {tmp_path}/run store" in " ".join(capsys.readouterr().out.split())


def test_the_verb_may_stand_behind_flags(capsys: Capture) -> None:
    assert orchestrate("-m", "plan", "load_path=cold,direct", "cluster.memory_gb=2") == 0
    assert "cells 2, to run 2" in capsys.readouterr().out


def test_faults_are_given_on_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    for folder in ("workloads/faults", "collectors"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "skip_fill.py").write_text("")
    tree = [f"code.candidate.path={tmp_path}", "cluster.memory_gb=2"]
    assert orchestrate("plan", *tree, "code.candidate.faults=[skip_fill]") == 0
    assert "faults=skip_fill" in capsys.readouterr().out
    assert orchestrate("plan", *tree, "code.candidate.faults=[other]") == 2
    assert "the faults are: skip_fill." in capsys.readouterr().err


def test_hydras_own_flags_answer_without_planning(tmp_path: Path) -> None:
    done = as_module("plan", "--cfg", "job", "+exp=kimi_k3_refit", "load_path=direct", f"store={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "name: kimi_k3_refit" in done.stdout
    assert "via: ${load_path.update}" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert as_module("--cfg", "job", "model=foo").returncode == 2


def test_a_plan_leaves_no_traces(tmp_path: Path) -> None:
    """No outputs/, no multirun/, no .hydra/, wherever it is started."""
    root = str(checkout())
    code = f"import sys; sys.path.insert(0, {root!r}); from orchestrator.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "plan", "+exp=kimi_k3_refit", "cluster.memory_gb=2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "load_path=cold", "cluster.memory_gb=2"]])
def test_a_reader_that_goes_away_is_no_defect(arguments: list[str]) -> None:
    """As `| head` does; 141 is what a shell says of programs that end by SIGPIPE."""
    command = [sys.executable, "-m", "orchestrator", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=checkout()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 141)


def test_the_module_entry_is_three_lines() -> None:
    assert len((checkout() / "orchestrator" / "__main__.py").read_text().splitlines()) == 3
