"""What the driver makes of the nodes' reports: which end counts, who is named, what is kept."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cell import Cell
from orchestrator.config.planning import plan
from orchestrator.failure import AttemptError
from orchestrator.gangs.launch import Allocation, GangSet, launch_command
from orchestrator.nodes import node_step
from orchestrator.provenance import checkout
from orchestrator.store import Store, read_json, write_json

TWO = Allocation("7", ["n1", "n2"])
LAYOUT = "parallelism={tp: 2, dp: 1, ep: 2, nodes: 2, gpus_per_node: 1}"


class Listener:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def take(self, record: Mapping[str, Any]) -> None:
        assert record["kind"] != "standing"

    def phase(self, text: str) -> None:
        self.phases.append(text)


def stage(node: int, name: str, found: Any, **about: Any) -> dict[str, Any]:
    return {"kind": "node_check", "node": node, "stage": name, "found": found, "error": None, **about}


def reports(node: int) -> list[dict[str, Any]]:
    machine = {
        "host": f"h{node}",
        "slurm_node": f"n{node + 1}",
        "ranks": f"{node}:{node + 1}",
        "python": "3.12.3",
    }
    return [
        stage(node, "machine", {**machine, "packages": {}, "sources": {}}),
        stage(node, "done", {"seconds": 1.0}),
    ]


@pytest.fixture(scope="module")
def cell() -> Cell:
    made = plan(["cluster=slurm", LAYOUT, "cluster.time='00:10:00'", "cluster.partition_limit='01:00:00'"])
    return made.cells[0].cell


@pytest.fixture
def attempt(cell: Cell, tmp_path: Path) -> Path:
    store = Store.open(tmp_path)
    folder = store.new_attempt(store.write_cell(cell))
    write_json(folder / "provenance.json", {"host": "login"})
    return folder


def check(
    monkeypatch: pytest.MonkeyPatch,
    cell: Cell,
    attempt: Path,
    said: list[Any],
    ends: AttemptError | None = None,
) -> Listener:
    """said: events of the step, which then ends well or as `ends` says."""

    def run(gangs: GangSet, allocation: Any, limits: Any, observe: Any) -> None:
        gangs.write()
        for event in [*said, {"kind": "standing", "gang": "preflight"}]:
            observe(event)
        if ends is not None:
            raise ends

    monkeypatch.setattr(node_step.gang, "run", run)
    listener = Listener()
    node_step.check_nodes(cell, Store(attempt.parents[2]), attempt, TWO, listener)
    return listener


def clock(offset: float) -> dict[str, Any]:
    return stage(0, "pair", {"clock": {"offset_s": offset, "round_trip_s": 0.1}, "bandwidth": {}}, peer=1)


def test_what_sound_nodes_report_is_added_to_the_provenance(
    monkeypatch: pytest.MonkeyPatch, cell: Cell, attempt: Path
) -> None:
    listener = check(monkeypatch, cell, attempt, [*reports(0), *reports(1), clock(120.0)])
    kept = read_json(attempt / "provenance.json")
    assert (kept["host"], sorted(kept["preflight"]["nodes"])) == ("login", ["n1", "n2"])
    assert kept["preflight"]["warnings"] == listener.phases
    assert "clock of node n2 is +120.0 s" in listener.phases[0]
    assert read_json(attempt / "preflight" / "node-00001.json")["found"]["machine"]["host"] == "h1"


def test_the_node_that_the_step_lost_is_the_bad_one(
    monkeypatch: pytest.MonkeyPatch, cell: Cell, attempt: Path
) -> None:
    lost = AttemptError("node_lost", "The launch command ended.", node="n1", log_tail="srun: error")
    with pytest.raises(
        AttemptError, match=r"Node n2 did not begin its check: .* must see the run store"
    ) as raised:
        check(monkeypatch, cell, attempt, reports(0), lost)
    failure = raised.value.failure
    assert (failure.type, failure.node, failure.log_tail) == ("bad_node", "n2", "srun: error")


def test_a_step_that_nobody_began_ended_for_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, cell: Cell, attempt: Path
) -> None:
    with pytest.raises(AttemptError) as raised:
        check(monkeypatch, cell, attempt, [], AttemptError("launch_failed", "No parents started."))
    assert raised.value.failure.type == "launch_failed"


def test_an_order_to_stop_is_no_fault_of_a_node(
    monkeypatch: pytest.MonkeyPatch, cell: Cell, attempt: Path
) -> None:
    with pytest.raises(AttemptError) as raised:
        check(monkeypatch, cell, attempt, reports(0), AttemptError("stopped", "Told to stop by SIGTERM."))
    assert raised.value.failure.type == "stopped"


def test_a_problem_of_all_nodes_is_not_blamed_on_one(
    monkeypatch: pytest.MonkeyPatch, cell: Cell, attempt: Path
) -> None:
    bound = {"low": 9, "high": None, "unit": "GB/s"}
    slow = {**cell, "cluster": {**cell["cluster"], "preflight": {"all_reduce": bound}}}
    whole = stage(0, "whole", {"bandwidth": {"cpu": {"all_reduce": 1.0}}})
    with pytest.raises(
        AttemptError, match=r"has 1 GB/s, less than cluster\.preflight\.all_reduce\.low=9"
    ) as raised:
        check(monkeypatch, slow, attempt, [*reports(0), *reports(1), whole])
    assert (raised.value.failure.type, raised.value.failure.node) == ("preflight", None)


def test_the_step_starts_where_the_folder_is_not_seen_and_outlives_a_node(
    monkeypatch: pytest.MonkeyPatch, cell: Cell, attempt: Path
) -> None:
    seen: list[GangSet] = []
    closed: list[bool] = []
    waiting = SimpleNamespace(close=lambda: closed.append(True))

    def run(gangs: GangSet, *_: Any) -> Any:
        gangs.write()
        seen.append(gangs)
        return waiting

    monkeypatch.setattr(node_step.gang, "run", run)
    with pytest.raises(AttemptError, match="did not begin"):
        node_step.check_nodes(cell, Store(attempt.parents[2]), attempt, TWO, Listener())
    command = launch_command(seen[0], TWO)
    assert {"--kill-on-bad-exit=0", "--wait=60"} <= set(command)
    assert not [word for word in command if word.startswith("--error")]
    assert command[command.index("-m") + 1 :][:2] == ["workloads.preflight", "--nodes=2"]
    assert "--no-network" not in command
    assert closed, "unfit nodes do not wait for gangs"
    assert "--stay" in command
    older = {**cell, "code": {**cell["code"], "candidate": {**cell["code"]["candidate"], "source": "0"}}}
    monkeypatch.setattr(node_step, "source_tree", lambda arm, store: store.root / "older")
    with pytest.raises(AttemptError, match="did not begin"):
        node_step.check_nodes(older, Store(attempt.parents[2]), attempt, TWO, Listener())
    assert seen.pop().tree == checkout(), "the arm may lack the check"
    monkeypatch.undo()
    monkeypatch.setattr(node_step.gang, "run", run)
    alone = {**cell, "cluster": {**cell["cluster"], "preflight": {"network": False}}}
    with pytest.raises(AttemptError, match="did not begin"):
        node_step.check_nodes(alone, Store(attempt.parents[2]), attempt, TWO, Listener())
    command = launch_command(seen[1], TWO)
    assert "--no-network" in command
    assert "--stay" not in command, "without the network nothing of it needs torch"


@pytest.mark.parametrize("change", [{"kind": "ray"}, {}])
def test_one_machine_without_gpus_is_not_checked_again(
    monkeypatch: pytest.MonkeyPatch, cell: Cell, attempt: Path, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(node_step.gang, "run", lambda *_: pytest.fail("a step was started"))
    one = {**cell, "cluster": {**cell["cluster"], **change}}
    if not change:
        one["parallelism"] = {**cell["parallelism"], "nodes": 1}
    node_step.check_nodes(one, Store(attempt.parents[2]), attempt, TWO, Listener())
