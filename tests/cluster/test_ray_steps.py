"""A Ray cluster inside of a job of a real Slurm: started in a step, its gangs run, and it is gone after that."""

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Job

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "toy_driver.py"

pytestmark = pytest.mark.slurm


def test_gangs_are_actors_of_a_cluster_that_the_step_starts(
    submit: Callable[..., Job], tmp_path: Path
) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    line = f"exec {shlex.join([sys.executable, *map(str, (DRIVER, folder, 'sum', 120, 'ray'))])}"
    job = submit(line, "--nodes=2", PYTHONPATH=str(ROOT))
    assert job.wait(240) == "COMPLETED", job.text()
    result = json.loads((folder / "outcome.json").read_text())
    assert result["error"] is None, result["error"]
    where = {event["node"]: event["host"] for event in result["events"] if event["kind"] == "node_started"}
    assert where == {0: "gb200-0", 1: "gb200-1"}
    ended = {event["rank"]: event["node"] for event in result["events"] if event["kind"] == "rank_exited"}
    assert ended == {rank: rank // 2 for rank in range(4)}
    await_gone(job.id, 15)
    assert not list(Path("/tmp").glob(f"r{job.id}-*"))


def await_gone(job: str, seconds: float) -> None:
    """Daemons and workers of Ray: all have the job's folder in their command lines."""
    deadline = time.monotonic() + seconds
    while left := [
        one
        for one in psutil.process_iter(["cmdline", "status"])
        if f"/tmp/r{job}-" in " ".join(one.info["cmdline"] or [])
        and one.info["status"] != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)
