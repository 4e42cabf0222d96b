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

ROOT = Path(__file__).parents[1]
MARK = "REFIT_TEST_COMMAND"  # a variable that every process of a command inherits
COMMAND_TIMEOUT_S = 800


@dataclass
class Outcome:
    """What a user sees of one command, and what it left. left: command lines of processes that outlived it."""

    exit_code: int
    output: str
    folder: Path | None  # of the experiment that it made
    left: list[str]

    @property
    def verdict(self) -> dict[str, Any]:
        """What the machine reads; empty where nothing was run."""
        return json.loads((self.folder / "verdict.json").read_text()) if self.folder else {}

    @property
    def cell(self) -> dict[str, Any]:
        """The only one of the verdict; empty where nothing was run."""
        [cell] = self.verdict.get("cells", [{}])
        return cell


def orchestrate(store: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Outcome:
    before, mark = set(store.glob("experiments/*")), secrets.token_hex(8)
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments, f"store='{store}'"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "1000", **(env or {}), MARK: mark},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    made = set(store.glob("experiments/*")) - before
    return Outcome(done.returncode, done.stdout + done.stderr, made.pop() if made else None, _marked(mark))


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found
