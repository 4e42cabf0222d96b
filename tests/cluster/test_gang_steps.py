"""Gangs as srun steps of a real Slurm: 16 ranks on 4 nodes start, fail with a name, and leave nothing behind."""

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Job
from workloads.stacks import find_tool, stacks_file

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "toy_driver.py"

pytestmark = pytest.mark.slurm
Submit = Callable[..., Job]


def drive(
    submit: Submit, folder: Path, via: str, *options: str, timeout_s: float = 60, **variables: str
) -> Job:
    line = f"exec {shlex.join([sys.executable, *map(str, (DRIVER, folder, via, timeout_s))])}"
    return submit(line, *options, PYTHONPATH=str(ROOT), **variables)


def outcome(folder: Path) -> dict:
    return json.loads((folder / "outcome.json").read_text())


def left_of(folder: Path) -> list[psutil.Process]:
    """Node parents and ranks of all nodes: their namespaces are below ours."""
    processes = psutil.process_iter(["cmdline", "status"])
    alive = [p for p in processes if p.info["status"] != psutil.STATUS_ZOMBIE]
    return [
        p
        for p in alive
        if "workloads.node" in (words := p.info["cmdline"] or []) and str(folder / "set") in words
    ]


def await_gone(folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := left_of(folder):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def await_ranks(folder: Path, job: Job) -> None:
    """Until all 16 ranks are in their second step."""
    deadline = time.monotonic() + 60
    files = [folder / "candidate" / f"progress-{rank:05d}.jsonl" for rank in range(16)]
    while not all(file.exists() and '"index":1' in file.read_text() for file in files):
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.1)


def test_plain_job_of_four_by_four_tasks(submit: Submit) -> None:
    line = "srun --ntasks-per-node=4 bash -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'"
    job = submit(line, "--ntasks-per-node=4", "--gres=gpu:4")
    assert job.wait(30) == "COMPLETED", job.text()
    assert Counter(job.text().splitlines()) == {f"gb200-{node} 0,1,2,3": 4 for node in range(4)}


def test_sixteen_ranks_on_four_nodes_end_well(submit: Submit, tmp_path: Path) -> None:
    job = drive(submit, tmp_path, "sum")
    assert job.wait(90) == "COMPLETED", job.text()
    result = outcome(tmp_path)
    assert result["error"] is None
    where = {e["node"]: e["host"] for e in result["events"] if e["kind"] == "node_started"}
    assert where == {node: f"gb200-{node}" for node in range(4)}
    ranks = {e["rank"]: e["node"] for e in result["events"] if e["kind"] == "rank_exited" and e["code"] == 0}
    assert ranks == {rank: rank // 4 for rank in range(16)}


def test_killed_rank_ends_the_job_with_its_rank_and_node(submit: Submit, tmp_path: Path) -> None:
    job = drive(submit, tmp_path, "kill:9")
    assert job.wait(90) == "COMPLETED", job.text()
    error = outcome(tmp_path)["error"]
    assert (error["type"], error["rank"], error["node"]) == ("rank_killed", 9, "gb200-2")
    await_gone(tmp_path, 1)


def test_raised_error_on_one_node_is_not_lost_among_those_of_the_others(
    submit: Submit, tmp_path: Path
) -> None:
    job = drive(submit, tmp_path, "raise:14")
    assert job.wait(90) == "COMPLETED", job.text()
    error = outcome(tmp_path)["error"]
    assert (error["type"], error["rank"], error["node"]) == ("rank_failed", 14, "gb200-3")
    assert "told to raise" in error["message"]


def test_hang_is_stopped_and_names_the_rank(submit: Submit, tmp_path: Path) -> None:
    """One rank of one node is stopped by a signal: it can say nothing itself."""
    job = drive(submit, tmp_path, "halt:6", timeout_s=10)
    assert job.wait(120) == "COMPLETED", job.text()
    result = outcome(tmp_path)
    error = result["error"]
    assert (error["type"], error["rank"], error["node"]) == ("hang", 6, "gb200-1")
    assert "No sign of life of ranks 6." in error["message"]
    assert "The process of rank 6 is stopped by a signal (state T)." in error["message"]
    texts = [stacks_file(tmp_path / "candidate", rank).read_text() for rank in range(16)]
    assert [text.count("(state T)") for text in texts] == [int(rank == 6) for rank in range(16)]
    if find_tool() is not None:
        assert "_halt (" in error["stack"]
    slowest = [e for e in result["events"] if e["kind"] == "standing"][-1]
    assert (slowest["step"], slowest["node"]) == ("2/2 update new", "gb200-1")
    await_gone(tmp_path, 1)


def test_variables_of_the_submitting_shell_do_not_steer_the_step(submit: Submit, tmp_path: Path) -> None:
    leaked = {
        "SLURM_NTASKS_PER_NODE": "7",
        "SLURM_GPUS_PER_NODE": "9",
        "SLURM_CPU_BIND": "map_cpu:0",
        "SLURM_CPUS_PER_TASK": "500",
        "SLURM_DISTRIBUTION": "arbitrary",
        "SLURM_HOSTFILE": "/no/such/file",
    }
    exports = " ".join(f"export {name}={value};" for name, value in leaked.items())
    line = f"{exports} exec {shlex.join([sys.executable, str(DRIVER), str(tmp_path), 'sum', '60'])}"
    job = submit(line, PYTHONPATH=str(ROOT))
    assert job.wait(90) == "COMPLETED", job.text()
    assert outcome(tmp_path)["error"] is None


def test_kill_9_of_the_driver_ends_the_step(submit: Submit, tmp_path: Path) -> None:
    job = drive(submit, tmp_path, "hang:6")
    await_ranks(tmp_path, job)
    assert len(left_of(tmp_path)) == 22  # 16 ranks, 4 node parents, 2 processes of srun
    [driver] = [p for p in psutil.process_iter(["cmdline"]) if str(DRIVER) in (p.info["cmdline"] or [])]
    driver.kill()
    assert job.wait(60) == "FAILED"
    await_gone(tmp_path, 15)


def test_cancelled_job_leaves_nothing(submit: Submit, slurm: Callable[..., str], tmp_path: Path) -> None:
    job = drive(submit, tmp_path, "hang:6")
    await_ranks(tmp_path, job)
    psutil.Popen(["scancel", job.id]).wait()
    assert job.wait(60) == "CANCELLED"
    await_gone(tmp_path, 15)
