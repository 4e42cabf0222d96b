"""The driver as the batch step of a real job: 16 toy ranks on 4 nodes, from cell.json to result.json."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.planning import plan
from orchestrator.store import Store, read_json
from tests.cluster.conftest import Job
from workloads.spec import Step

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "native")])

pytestmark = pytest.mark.slurm
Submit = Callable[..., Job]


def new_attempt(folder: Path, via: str) -> Path:
    """Of a cell whose candidate starts, is updated as `via` tells the toy, and answers as a fresh start does."""
    weights = folder / "weights"
    weights.mkdir()
    (weights / "model.safetensors").touch()
    changes = [
        "load_path=cold",
        "parallelism=tp4_dp4_ep16",
        "collect=tensors",
        "cluster=slurm",
        "cluster.partition=gb200",
    ]
    cell: dict[str, Any] = plan(changes).cells[0].cell
    cell["backend"]["engine"] = "toy_engine:ToyEngine"
    for checkpoint in cell["checkpoints"].values():
        checkpoint["path"] = str(weights)
    steps = [
        Step("start", "old", "sum"),
        Step("update", "new", via),
        Step("observe", name="updated", collect=["generations"]),
    ]
    check = {
        "name": "as_fresh",
        "rule": "same_generations",
        "left": "updated",
        "right": "fresh.new",
        "required": True,
    }
    cell["load_path"] = {"name": "toy", "steps": [asdict(step) for step in steps], "checks": [check]}
    store = Store.open(folder / "store")
    return store.new_attempt(store.write_cell(cell))


def start(submit: Submit, attempt: Path, *options: str) -> Job:
    line = f"exec {shlex.join([sys.executable, '-m', 'orchestrator.driver', str(attempt)])}"
    return submit(line, *options, PYTHONPATH=PATHS)


def await_hang(attempt: Path, job: Job) -> None:
    """Until all ranks are in the step in which one of them hangs."""
    files = [attempt / "candidate" / f"progress-{rank:05d}.jsonl" for rank in range(16)]
    deadline = time.monotonic() + 90
    while not all(file.exists() and '"index":1' in file.read_text() for file in files):
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.1)


def test_job_ends_with_the_exit_code_of_its_verdict(submit: Submit, tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, "sum")
    job = start(submit, attempt)
    assert job.wait(120) == "COMPLETED", job.text()
    result = read_json(attempt / "result.json")
    assert (result["verdict"], result["starts"], result["error"]) == ("PASS", 2, None)
    assert "candidate 3/3 observe updated: done by 16 ranks" in job.text()


def test_killed_rank_fails_the_job_and_names_rank_and_node(submit: Submit, tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, "kill:13")
    job = start(submit, attempt)
    assert job.wait(120) == "FAILED"
    error = read_json(attempt / "result.json")["error"]
    assert (error["type"], error["rank"], error["node"]) == ("rank_killed", 13, "gb200-3")


@pytest.mark.parametrize(("limit", "type_"), [("--time=30", "stopped"), ("--time=1", "time_limit")])
def test_warning_signal_becomes_a_typed_result(
    submit: Submit, tmp_path: Path, limit: str, type_: str
) -> None:
    """Slurm sends SIGTERM to the batch step ahead of the time limit; an operator may do it at any time."""
    attempt = new_attempt(tmp_path, "hang:2")
    job = start(submit, attempt, limit)
    await_hang(attempt, job)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job.id], check=True)
    assert job.wait(60) == "FAILED"
    assert read_json(attempt / "result.json")["error"]["type"] == type_
    assert "in _hang" in (attempt / "candidate" / "rank-00002.log").read_text()


def test_node_that_loses_power_ends_the_job(
    submit: Submit, slurm: Callable[..., str], tmp_path: Path
) -> None:
    attempt = new_attempt(tmp_path, "hang:2")
    job = start(submit, attempt)
    await_hang(attempt, job)
    slurm("one_machine_node.sh", "fail", "gb200-3")
    try:
        assert job.wait(90) in ("NODE_FAIL", "FAILED")
    finally:
        slurm("one_machine_node.sh", "restore")
    error = read_json(attempt / "result.json")["error"]
    assert (error["type"], error["node"]) == ("node_lost", "gb200-3")
    assert "[12, 13, 14, 15]" in error["message"]
