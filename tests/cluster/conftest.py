"""Brings up the one-machine Slurm once for the session, shared with other sessions on this machine."""

import fcntl
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "slurm"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class Job:
    id: str
    output: Path

    def state(self) -> str:
        shown = _run(["scontrol", "show", "job", self.id, "--oneliner"]).stdout
        return shown.partition("JobState=")[2].split(maxsplit=1)[0]

    def wait(self, seconds: float) -> str:
        """The state in which the job ended. Fails the test when it has not after `seconds`."""
        deadline = time.monotonic() + seconds
        while (state := self.state()) not in ENDED:
            assert time.monotonic() < deadline, f"job {self.id} is still {state}: {self.text()}"
            time.sleep(0.2)
        return state

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def _script(name: str, *arguments: str) -> str:
    done = subprocess.run(
        ["bash", str(SCRIPTS / name), *arguments], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def slurm() -> Iterator[Callable[..., str]]:
    """Slurm with nodes gb200-0 to gb200-3; the value runs a script of slurm/ by name. SLURM_CONF is set."""
    if os.geteuid() != 0:
        pytest.skip("the one-machine Slurm needs root")
    with (Path(tempfile.gettempdir()) / "one-machine-slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        before = dict(os.environ)
        os.environ["SLURM_CONF"] = _script("one_machine_up.sh").strip().removeprefix("export SLURM_CONF=")
        yield _script
        os.environ.clear()
        os.environ.update(before)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another session still uses it, and will stop it
        _script("one_machine_down.sh")


@pytest.fixture
def submit(slurm: Callable[..., str], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Submits a line of shell as a batch script on 4 nodes; cancels what is left at the end of the test."""
    jobs: list[Job] = []

    def submit(line: str, *options: str, **variables: str) -> Job:
        output = tmp_path / f"job-{len(jobs)}.log"
        command = ["sbatch", "--parsable", "--nodes=4", "--no-requeue", f"--output={output}", *options]
        done = subprocess.run(
            [*command, "--wrap", line], check=True, capture_output=True, text=True, env=os.environ | variables
        )
        jobs.append(Job(done.stdout.strip().partition(";")[0], output))
        return jobs[-1]

    yield submit
    for job in jobs:
        subprocess.run(["scancel", job.id], check=False)
        job.wait(30)


@pytest.fixture
def clean(slurm: Callable[..., str], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """The same as `slurm`; jobs that a test leaves in stores below its folder are cancelled."""
    yield slurm
    records = [json.loads(file.read_text()) for file in tmp_path.glob("*/jobs/*/submitted.json")]
    jobs = [record["job"] for record in records]
    if jobs:
        subprocess.run(["scancel", "--quiet", *jobs], check=False, timeout=60)
