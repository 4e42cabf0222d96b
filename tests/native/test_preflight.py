"""Nodes that check one another over real sockets: processes of this machine, one of which is unfit."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.nodes.node_check import problems, summary
from orchestrator.nodes.node_records import Expected, Node, read_events
from workloads.preflight import __main__ as preflight
from workloads.preflight import network

LIMIT_S = 60
Fault = Callable[[], Any]  # of one node, put in place before it starts


@pytest.fixture
def pids() -> Iterator[dict[int, int]]:
    started: dict[int, int] = {}
    yield started
    for pid in started.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run(
    pids: dict[int, int], folder: Path, nodes: int, faults: dict[int, Fault | None], *options: str
) -> list[Node]:
    """What all nodes reported. faults: by node; None: it is not even started."""
    meet = f"127.0.0.1:{port()}"
    for node in range(nodes):
        fault = faults.get(node, bool)
        if fault is None:
            continue
        words = [str(folder), f"--node-rank={node}", f"--ranks={node}:{node + 1}", f"--nodes={nodes}"]
        pid = os.fork()
        if pid == 0:
            _be_node(folder / f"out-{node}", ["preflight", *words, f"--meet={meet}", *options], fault)
        pids[node] = pid
    deadline = time.monotonic() + LIMIT_S
    while pids and time.monotonic() < deadline:
        ended = [node for node, pid in pids.items() if os.waitpid(pid, os.WNOHANG)[0]]
        for node in ended:
            del pids[node]
        time.sleep(0.02)
    assert not pids, f"nodes {sorted(pids)} still run"
    lines = [line for file in sorted(folder.glob("out-*")) for line in file.read_text().splitlines()]
    return read_events(expected(nodes), [json.loads(line) for line in lines])


def _be_node(output: Path, words: list[str], fault: Fault) -> None:
    status = 1
    try:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        sys.argv = words
        network.LINK_S = 1.5
        # All run on one host, and judging has to tell them apart.
        preflight.socket.gethostname = lambda: output.name  # type: ignore[attr-defined]
        fault()
        preflight.main()
    finally:
        os._exit(status)


def expected(nodes: int, **low: float) -> Expected:
    bounds = {key: {"low": value, "high": None, "unit": "GB/s"} for key, value in low.items()}
    return Expected([f"g{node}" for node in range(nodes)], 1, bounds)


def at_fault(nodes: list[Node], **low: float) -> tuple[set[str], str]:
    found = problems(expected(len(nodes), **low), nodes)
    return {name for problem in found for name in problem.nodes}, " ".join(problem.text for problem in found)


def slow_and_two_minutes_ahead() -> None:
    reduce, now = network.dist.all_reduce, time.time

    def slow(*arguments: Any) -> None:
        time.sleep(0.2)
        reduce(*arguments)

    network.dist.all_reduce = slow  # type: ignore[attr-defined]
    network.time.time = lambda: now() + 120  # type: ignore[attr-defined]


def test_a_slow_node_and_its_clock_are_found(pids: dict[int, int], tmp_path: Path) -> None:
    nodes = run(pids, tmp_path, 4, {2: slow_and_two_minutes_ahead}, f"--source={Path(__file__).parents[2]}")
    assert at_fault(nodes) == (set(), ""), "nothing is judged without a bound"
    names, text = at_fault(nodes, pair_all_reduce=0.03)
    assert names == {"g2"}, text
    assert "3 of 6 pairs are out of bounds, which node g2 explains" in text
    told = summary(nodes)
    assert told["clock_offset_s"]["g2"] == pytest.approx(120, abs=1)
    assert [warning.split(" is ")[0] for warning in told["warnings"]] == ["The clock of node g2"]
    assert len({tuple(node.found["machine"]["sources"].values()) for node in nodes}) == 1
    assert [sorted(node.pairs) for node in nodes] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert nodes[1].found["whole"]["bandwidth"]["cpu"]["all_to_all"] > 0


def test_a_folder_that_is_another_one_on_one_node(pids: dict[int, int], tmp_path: Path) -> None:
    def elsewhere() -> None:
        (tmp_path / "local").mkdir()
        sys.argv[1] = str(tmp_path / "local")

    names, text = at_fault(run(pids, tmp_path, 3, {1: elsewhere}, "--grace=0.5"))
    assert names == {"g1"}, text
    assert "do not see the files that others write in the run store, which node g1 explains" in text


def test_a_folder_that_one_node_cannot_write_to(pids: dict[int, int], tmp_path: Path) -> None:
    def missing() -> None:
        sys.argv[1] = str(tmp_path / "not mounted")

    names, text = at_fault(run(pids, tmp_path, 2, {1: missing}, "--grace=0.5"))
    assert names == {"g1"}, text
    assert "failed in its stage 'files': FileNotFoundError" in text


def no_route() -> None:
    def pair(*arguments: Any) -> None:
        raise ConnectionError("no route to host")

    network.pair = pair


def test_a_node_that_reaches_nobody(pids: dict[int, int], tmp_path: Path) -> None:
    names, text = at_fault(run(pids, tmp_path, 4, {3: no_route}))
    assert names == {"g3"}, text
    assert "which node g3 explains" in text


def dies_in_its_second_pair() -> None:
    pair = network.pair

    def once(*arguments: Any) -> Any:
        network.pair = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return pair(*arguments)

    network.pair = once


def test_a_node_that_dies_on_the_way(pids: dict[int, int], tmp_path: Path) -> None:
    names, text = at_fault(run(pids, tmp_path, 3, {1: dies_in_its_second_pair}, "--grace=0.5"))
    assert names == {"g1"}, text
    assert "Node g1 ended in its check after 5 reports" in text


def test_a_node_that_never_came(pids: dict[int, int], tmp_path: Path) -> None:
    nodes = run(pids, tmp_path, 3, {2: None}, "--limit=1")
    assert [node.found.get("meet") for node in nodes] == [[2], [2], None]
    names, text = at_fault(nodes)
    assert names == {"g2"}, text


def test_nodes_that_are_to_meet_nobody_say_what_they_are(pids: dict[int, int], tmp_path: Path) -> None:
    nodes = run(pids, tmp_path, 2, {}, "--no-network")
    assert [sorted(node.found) for node in nodes] == [["done", "machine"]] * 2
    assert at_fault(nodes) == (set(), "")


def test_a_collective_that_changes_numbers_is_an_error(pids: dict[int, int], tmp_path: Path) -> None:
    def corrupts() -> None:
        reduce = network.dist.all_reduce

        def wrong(tensor: Any) -> None:
            reduce(tensor)
            tensor[7] += 1

        network.dist.all_reduce = wrong  # type: ignore[attr-defined]

    nodes = run(pids, tmp_path, 2, {1: corrupts})
    assert "gave other numbers than were sent" in nodes[1].errors["pair"]


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_every_two_nodes_meet_once_and_at_the_same_time(nodes: int) -> None:
    met = [network.partners(node, nodes) for node in range(nodes)]
    for node, others in enumerate(met):
        assert sorted(other for other in others if other is not None) == sorted({*range(nodes)} - {node})
        assert all(met[other][turn] == node for turn, other in enumerate(others) if other is not None)
    assert all([others[turn] for others in met].count(None) == nodes % 2 for turn in range(len(met[0])))


def test_the_clock_of_the_partner_is_taken_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trips: one of 8 s, whose middle tells little, and one of 2 s, in the middle of which it is 101."""
    moments = iter([0.0, 8.0, 100.0, 102.0])
    answers = iter([7.5, 131.0])
    monkeypatch.setattr(network, "PINGS", 2)
    monkeypatch.setattr(network.time, "time", lambda: next(moments))
    monkeypatch.setattr(network.dist, "send", lambda tensor, dst: None)
    monkeypatch.setattr(network.dist, "recv", lambda tensor, src: tensor.fill_(next(answers)))
    assert network.clock_offset(0) == {"offset_s": 30.0, "round_trip_s": 2.0}
