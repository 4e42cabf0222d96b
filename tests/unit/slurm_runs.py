"""One experiment on the fake Slurm, and the plans and stores that its tests begin with."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import Cluster

from orchestrator.cell import references
from orchestrator.cluster.follow import Look, advance
from orchestrator.cluster.history import Experiment, load
from orchestrator.config.planning import Plan, plan
from orchestrator.experiment import start
from orchestrator.failure import Failure
from orchestrator.result import unjudged
from orchestrator.store import Store, write_json

BATCH = ["cluster=slurm", "cluster.partition=batch", "cluster.partition_limit=02:00:00", "collect=tensors"]


@pytest.fixture(name="apart", scope="module")
def apart_fixture() -> Plan:
    """Three cells that share nothing."""
    return plan([*BATCH, "load_path=cold", "checkpoints.new.seed=1,2,3"], multirun=True)


@pytest.fixture(name="sharing", scope="module")
def sharing_fixture() -> Plan:
    """Two cells that need the same fresh start, which the first one makes."""
    return plan([*BATCH, "load_path=cold,direct"], multirun=True)


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs")


class Run:
    """One experiment on the fake cluster. said: what was reported."""

    def __init__(self, store: Store, made: Plan) -> None:
        self.store, self.folder = store, start(store, made, [])
        self.experiment: Experiment = load(store, self.folder)
        self.names = list(self.experiment.cells)
        self.said: list[str] = []

    def look(self) -> Look:
        return advance(self.store, self.experiment, self.said.append)

    def attempt(self, cell: int = 0) -> Path:
        return self.store.attempts(self.names[cell])[-1]

    def count(self) -> list[int]:
        return [len(self.store.attempts(name)) for name in self.names]

    def error(self, cell: int = 0) -> dict[str, Any]:
        result = self.store.result(self.attempt(cell))
        assert result is not None
        return dict(result["error"])

    def finish(self, cell: int, type_: str | None = None, node: str | None = None) -> None:
        """The driver's result: a PASS that leaves its references, or a typed ERROR."""
        attempt, frozen = self.attempt(cell), self.experiment.cells[self.names[cell]]
        if type_ is None:
            for reference in references(frozen):
                (self.store.references / reference.key).mkdir(exist_ok=True)
        verdict, failure = (
            ("PASS" if type_ is None else "ERROR"),
            Failure(type_ or "", "It broke.", node=node),
        )
        result = unjudged(frozen, attempt.parent.name, attempt.name, verdict, failure)
        write_json(attempt / "result.json", result if type_ else {**result, "error": None})

    def age(self, cell: int, seconds: float) -> None:
        """As if the look that found the attempt's job gone had been so long ago."""
        marker = self.attempt(cell) / "gone"
        then = marker.stat().st_mtime - seconds
        os.utime(marker, (then, then))


@pytest.fixture(name="run")
def run_fixture(cluster: Cluster, store: Store, apart: Plan) -> Run:
    return Run(store, apart)


@pytest.fixture(name="pair")
def pair_fixture(cluster: Cluster, store: Store, sharing: Plan) -> Run:
    made = Run(store, sharing)
    made.look()
    return made
