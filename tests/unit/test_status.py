"""The verb `status` on the fake Slurm: one look for all cells, on a screen of any width."""

import io

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401
from rich.console import Console
from slurm_runs import Run, apart_fixture, run_fixture, store_fixture  # noqa: F401

from orchestrator.gangs.signs import STANDING
from orchestrator.store import write_json
from orchestrator.verbs.status import show_status


def lines(run: Run, width: int = 100) -> list[str]:
    out = io.StringIO()
    assert show_status(run.store, [run.folder.name], Console(width=width, file=out)) == 0
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [100, 80])
def test_each_cell_with_its_job_and_what_is_left_of_its_time(width: int, cluster: Cluster, run: Run) -> None:
    run.look()
    cluster.change("100", states=["RUNNING", "PENDING", "COMPLETED"], nodes="gb200-[0-3]")
    standing = {"gang": "candidate", "step": "2/3 update new", "rank": 6, "node": "gb200-1", "silent_s": 41.2}
    write_json(run.attempt(0) / STANDING, standing)
    run.finish(2)
    cluster.calls()
    said = lines(run, width)
    assert cluster.calls() == ["squeue"]
    assert max(map(len, said)) <= width
    assert said[1].split() == ["cell", "checkpoints.new.seed", "attempt", "state", "time", "left"]
    running, pending, passed = (line.split() for line in said[2:] if line[0] != " ")
    assert running[:5] == [run.names[0][:12], "1", "1", "job", "100_0"]
    assert running[-1] == "1:00", "the others have used nothing of theirs"
    assert pending[:6] == [run.names[1][:12], "2", "1", "job", "100_1", "PENDING"]
    assert passed == [run.names[2][:12], "3", "1", "PASS"]
    state = " ".join(line[45:-9].strip() for line in said[2:])
    assert (
        "RUNNING on gb200-[0-3] candidate 2/3 update new, rank 6 on gb200-1, silent for 41 s job 100_1"
        in state
    )


def test_time_that_is_not_known_is_not_shown(cluster: Cluster, run: Run) -> None:
    """sacct tells a job's limit, and nothing runs where the queue has forgotten it."""
    run.look()
    cluster.change("100", gone=True, accounted=["RUNNING"] * 3)
    assert "time left" not in lines(run)[1]
    assert cluster.calls().count("sacct") == 1
