"""Runs a script that a report printed as whoever maintains the engine would: with vLLM, and without this project."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SCRIPT_TIMEOUT_S = 400


@dataclass
class Run:
    returncode: int
    output: str


def run_script(python: Path, script: str, folder: Path) -> Run:
    """Runs `script` as `repro.py` in `folder`, with nothing of this project on the path."""
    (folder / "repro.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "repro.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
    )
    return Run(done.returncode, done.stdout + done.stderr)
