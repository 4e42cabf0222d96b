"""Runs one command of the orchestrator as a user does, and finds what it leaves behind."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
MARK = "REFIT_TEST_COMMAND"  # a variable that every process of a command inherits
COMMAND_TIMEOUT_S = 400


@dataclass
class Outcome:
    exit_code: int
    output: str
    cell: dict[str, Any]  # the only one of its verdict; empty where nothing was run
    left: list[str]  # command lines of processes that outlived the command


def orchestrate(store: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Outcome:
    place = (
        f"store={store}" if arguments[0] == "judge" else f"store='{store}'"
    )  # as the shell, as Hydra reads it
    before, mark = set(store.glob("experiments/*/verdict.json")), secrets.token_hex(8)
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments, place],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "1000", **(env or {}), MARK: mark},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    made = set(store.glob("experiments/*/verdict.json")) - before
    [cell] = json.loads(made.pop().read_text())["cells"] if made else [{}]
    return Outcome(done.returncode, done.stdout + done.stderr, cell, _marked(mark))


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found
