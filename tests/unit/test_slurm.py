"""What is asked of Slurm and how its answers are read."""

import subprocess
from typing import Any

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401

from orchestrator.cluster import slurm
from orchestrator.config.planning import plan


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("batch|4:00:00", 14400),
        ("batch|1-00:00:00", 86400),
        ("batch|30:00", 1800),
        ("batch|infinite", None),
        ("", None),
    ],
)
def test_the_partitions_own_limit(cluster: Cluster, said: str, seconds: int | None) -> None:
    cluster.say("sinfo", said)
    assert slurm.partition_limit("batch") == seconds


def test_a_plan_asks_slurm_for_the_limit(cluster: Cluster) -> None:
    cluster.say("sinfo", "batch|30:00")
    with pytest.raises(Exception, match="partition batch allows 1800 s"):
        plan(["cluster=slurm", "cluster.partition=batch"])


def test_a_hanging_command_is_a_sentence(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("squeue", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(slurm.SlurmError, match="squeue did not answer within 30 s"):
        slurm.queue()


@pytest.mark.parametrize(
    ("said", "end"),
    [("RUNNING|1796002774", 1796002774.0), ("COMPLETING|1796002774", None), ("RUNNING|NONE", None)],
)
def test_a_job_that_is_being_ended_is_not_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, said: str, end: float | None
) -> None:
    monkeypatch.setattr(slurm, "_ask", lambda *_: f"{said}\n")
    assert slurm.job_end("1") == end
