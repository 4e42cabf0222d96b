"""Runs whole experiments as a user does, in a store of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """What a user sees of one command, and the machine's verdict when there is one."""

    exit_code: int
    output: str
    verdict: dict[str, Any] | None

    def codes(self, cell: dict[str, Any]) -> list[str]:
        return [finding["code"] for finding in cell["findings"]]


Orchestrate = Callable[..., Outcome]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that each clean reference is made once."""
    return tmp_path_factory.mktemp("run store")  # with a space


@pytest.fixture(scope="session")
def orchestrate(store: Path) -> Orchestrate:
    def run(*arguments: str, timeout: int = 240) -> Outcome:
        before = set(store.glob("experiments/*/verdict.json"))
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments, f"store='{store}'"],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        new = set(store.glob("experiments/*/verdict.json")) - before
        verdict = json.loads(new.pop().read_text()) if new else None
        return Outcome(done.returncode, done.stdout + done.stderr, verdict)

    return run
