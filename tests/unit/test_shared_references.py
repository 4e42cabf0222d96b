"""Cells that share a reference: one makes it, the others wait, and its failure is their cause."""

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401
from slurm_runs import Run, apart_fixture, pair_fixture, run_fixture, sharing_fixture, store_fixture  # noqa: F401

from orchestrator.cluster.upstream import check
from orchestrator.config.planning import Plan
from orchestrator.failure import AttemptError
from orchestrator.store import Store, read_json, write_json


def test_a_shared_reference_is_waited_for(cluster: Cluster, pair: Run) -> None:
    assert [len(job["states"]) for job in cluster.jobs.values()] == [1, 1]
    assert cluster.jobs["101"]["after"] == "afterany:100_0"
    record = read_json(pair.attempt(1) / "job.json")
    assert [(need["cell"], need["attempt"]) for need in record["needs"]] == [(pair.names[0], "attempt-001")]
    with pytest.raises(AttemptError, match="left no result"):
        check(pair.store, pair.attempt(1), 0.0)
    pair.finish(0)
    check(pair.store, pair.attempt(1), 0.0)


def test_its_failure_is_the_cause_of_those_that_wait(cluster: Cluster, pair: Run) -> None:
    pair.finish(0, "rank_failed")
    with pytest.raises(AttemptError, match="ended with ERROR rank_failed: It broke") as raised:
        check(pair.store, pair.attempt(1), 60.0)
    pair.finish(1, "upstream")
    result = pair.store.result(pair.attempt(1))
    assert result is not None
    write_json(pair.attempt(1) / "result.json", {**result, "verdict": "NOT_RUN"})
    assert raised.value.failure.type == "upstream"
    assert pair.look().is_over
    assert pair.count() == [1, 1]
    assert pair.store.finished(pair.names[1]) is None, "it is tried again with the cell it waits for"


def test_a_retried_reference_brings_those_that_wait_back(cluster: Cluster, pair: Run) -> None:
    pair.finish(0, "preempted")
    pair.finish(1, "upstream")
    pair.look()
    assert pair.count() == [2, 2]
    assert cluster.jobs["103"]["after"] == "afterany:102_0"


def test_those_that_wait_for_a_refused_cell_are_not_submitted(
    cluster: Cluster, store: Store, sharing: Plan
) -> None:
    cluster.fault("sbatch", "sbatch: error: invalid partition specified: nowhere")
    made = Run(store, sharing)
    made.look()
    results = [store.result(made.attempt(cell)) for cell in range(2)]
    assert [result["verdict"] for result in results if result] == ["ERROR", "NOT_RUN"]
    assert "nowhere" in made.error(1)["message"]
    assert made.look().is_over
