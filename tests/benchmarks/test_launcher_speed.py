"""Fifty cells on the real Slurm by us and by Hydra's submitit launcher: calls of Slurm, and time to the last result.

Both start one Python process for each cell, which does nothing: the launcher's composes the config once more, ours is
the driver. The launcher is installed beside the test from PyPI, since nothing else needs it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cluster import follow
from orchestrator.cluster.history import load
from orchestrator.experiment import start
from orchestrator.store import Store
from tests.cluster.conftest import slurm  # noqa: F401
from tests.cluster.toy_experiment import ROOT, shim, toys

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

CELLS = 50
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo")
APP = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def app(config):
    return 0
app()
"""


@pytest.fixture(name="launcher")
def launcher_fixture(tmp_path: Path) -> Path:
    """Folder with the launcher's package, for PYTHONPATH."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path / "launcher"),
    ]
    done = subprocess.run(
        [*command, "hydra-submitit-launcher==1.2.0"], capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        pytest.skip(f"hydra-submitit-launcher cannot be installed here: {done.stderr.strip()[-300:]}")
    return tmp_path / "launcher"


@pytest.fixture(name="calls")
def calls_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Number of Slurm's commands that were called since the last time that this was asked."""
    log = tmp_path / "calls"
    for name in COMMANDS:
        shim(tmp_path / "counting", name, f'echo {name} >>"{log}"; exec $REAL "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'counting'}:{os.environ['PATH']}")

    def calls() -> int:
        count = len(log.read_text().split()) if log.exists() else 0
        log.unlink(missing_ok=True)
        return count

    return calls


@pytest.mark.usefixtures("slurm")
def test_fifty_cells_against_the_launcher(launcher: Path, calls: Callable[[], int], tmp_path: Path) -> None:
    made = toys(tmp_path, "load_path=cold", f"checkpoints.new.seed=range(1,{CELLS + 1})", "cluster.poll_s=1")
    store = Store.open(made.store)
    calls()
    began = time.monotonic()
    follow.watch(store, load(store, start(store, made, [])), print)
    ours, our_calls = time.monotonic() - began, calls()
    assert all(store.finished(one.id) is not None for one in made.cells)
    (tmp_path / "app.py").write_text(APP)
    options = ["partition=gb200", "nodes=1", "tasks_per_node=1", "timeout_min=10"]
    command = [sys.executable, "app.py", "-m", "hydra/launcher=submitit_slurm", f"+cell=range({CELLS})"]
    command += [f"hydra.launcher.{option}" for option in options]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(launcher), str(ROOT)])}
    for _ in range(3):  # its sweep ends with the first job of which Slurm fails to start a step
        began = time.monotonic()
        sweep = subprocess.run(
            command, cwd=tmp_path, env=variables, timeout=600, capture_output=True, text=True
        )
        theirs, their_calls = time.monotonic() - began, calls()
        if sweep.returncode == 0:
            break
        print(f"The launcher's sweep failed: {sweep.stderr}")
    assert sweep.returncode == 0
    print(
        f"{CELLS} cells: {our_calls} calls of Slurm and {ours:.1f} s to the last result, by the launcher {their_calls} "
        f"calls and {theirs:.1f} s"
    )
    assert our_calls < their_calls
    assert ours < theirs
