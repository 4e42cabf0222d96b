"""The verb `runs`, and what every verb about runs says of a store that is damaged or does not have the run."""

import io
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from slurm_runs import Run, apart_fixture, store_fixture  # noqa: F401
from test_cli import orchestrate

from orchestrator.cluster.jobs import JOB
from orchestrator.config.planning import Plan
from orchestrator.store import Store, read_json, write_json
from orchestrator.verbs import runs

Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="run")
def run_fixture(store: Store, apart: Plan) -> Run:
    return Run(store, apart)


def rename(run: Run, name: str, created: str) -> None:
    """As if the run had another name, and had begun then."""
    run.folder = run.folder.rename(run.folder.with_name(name))
    index = read_json(run.folder / "cells.json")
    write_json(run.folder / "cells.json", {**index, "experiment": name, "created": created})


def test_the_newest_comes_first_with_what_its_cells_are(
    store: Store, apart: Plan, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    first, second = Run(store, apart), Run(store, apart)
    long = "kimi_k3_refit-20261130-023638-ffc3a2"
    rename(first, long, "2026-11-30T02:36:38+0100")
    rename(second, "newer", "2026-11-30T02:00:00+0000")
    write_json(first.folder / "verdict.json", {"verdict": "FAIL", "counts": {"PASS": 1, "FAIL": 2}})
    for name in second.names[:2]:
        store.new_attempt(name)
    write_json(second.attempt(0) / JOB, {})
    assert orchestrate("runs", f"store={store.root}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line[0] != " "] == ["run", "newer", long]
    text = " ".join(" ".join(lines).split())
    assert "newer 11-30 02:00 3 1 running, 1 stopped, 1 not started slurm" in text
    assert f"{long} 11-30 01:36 3 2 FAIL, 1 PASS slurm" in text
    (second.folder / "cells.json").write_text("{")
    assert orchestrate("runs", f"store={store.root}") == 0
    assert "cells.json is damaged" in capsys.readouterr().out
    assert orchestrate("status", f"store={store.root}") == 0
    assert long in capsys.readouterr().out, "a damaged run does not hide the others"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_and_verdicts_stay_whole_on_a_narrow_screen(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.show.sys.stdout.isatty", lambda: is_terminal)
    name, verdicts = "kimi_k3_refit-20261130-023638-ffc3a2", "2 FAIL, 2 ERROR, 20 PASS"
    out = Console(width=80, file=io.StringIO())
    rows = [(0.0, (name, "24", verdicts, "slurm")), (0.0, ("adhoc", "1", "1 PASS", "local on login-1"))]
    out.print(runs._table(rows, is_narrow=True))
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert [name, *verdicts.split(), "slurm"] in [line.split() for line in lines]


def test_an_empty_store_has_no_runs(store: Store, tmp_path: Path, capsys: Capture) -> None:
    assert orchestrate("runs", f"store={store.root}") == 0
    assert "No run in" in capsys.readouterr().out
    assert orchestrate("runs", f"store={tmp_path / 'none'}") == 2
    assert "There is no run store at" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["logs", "cancel", "resume", "status", "report"])
def test_what_is_damaged_or_not_there_is_a_sentence(verb: str, run: Run, capsys: Capture) -> None:
    store = f"store={run.store.root}"
    name = run.folder.name

    def says(*arguments: str) -> str:
        assert orchestrate(*arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert "Traceback" not in said
        return said

    assert "There is no run 'other'" in says(verb, "other", store)
    if verb != "status":
        assert f"{verb} needs the name of" in says(verb, store)
        shutil.rmtree(run.store.cells)
        words = [run.names[0][:12]] if verb == "logs" else []
        assert "is not there, or damaged" in says(verb, name, *words, store)
    for text in ("", "{}", '{"cells": []}', '{"cells": [{"id": 1}]}', "[1]"):
        (run.folder / "cells.json").write_text(text)
        assert "cells.json is damaged" in says(verb, name, store)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["logs", "x", "--fast"], "--fast is not an option of logs; see logs --help."),
        (["logs", "x", "--rank", "many"], "--rank: 'many' is neither the number of a rank nor `all`"),
        (["logs", "x", "--rank", "--follow"], "--rank: expected one argument; see logs --help."),
        (["logs", "x", "--arm", "both"], "--arm: invalid choice: 'both'"),
        (["cancel", "x", "model=y"], "cancel knows only store=PATH, not model=:"),
        (["resume", "x", "y"], "resume needs the name of one run"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], sentence: str, store: Store, capsys: Capture
) -> None:
    assert orchestrate(*arguments, f"store={store.root}") == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["runs", "logs", "cancel", "resume"])
def test_each_verb_explains_itself(verb: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", "80")
    assert orchestrate(verb, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m orchestrator {verb} ")
    assert max(map(len, text.splitlines()[1:])) <= 90
