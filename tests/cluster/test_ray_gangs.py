"""Gangs as actors of a real Ray cluster: they end well, fail with a name, and leave nothing behind."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.failure import AttemptError, Failure
from orchestrator.gangs.gang import run
from orchestrator.gangs.launch import GangSet, RayCluster, free_port, ray_launch
from tests.cluster.ray_nodes import RayNodes
from tests.commands import orchestrate
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "toy_driver.py"
TOY = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'native'}"}
Events = list[Mapping[str, Any]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head without room, and two nodes of two CPUs."""
    found = RayNodes(workers=2, cpus=2)
    yield found
    found.down()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "with a space"


def toy_set(folder: Path, nodes: RayNodes, via: str, count: int = 2, wait_s: float = 60) -> GangSet:
    spec = GangSpec(
        name="candidate",
        output=str(folder / "candidate"),
        model=Model(),
        parallelism=Parallelism(tp=2 * count, nodes=count, gpus_per_node=2),
        backend=Backend(engine="toy_engine:ToyEngine"),
        checkpoints={},
        checkpoint_dirs={},
        steps=[Step("start", "old", "sum"), Step("update", "new", via)],
        master_port=free_port(),
    )
    ray = RayCluster(nodes.address, wait_s)
    return GangSet(folder / "set", [spec], ROOT, parents=count, environment=TOY, ray=ray)


def failure_of(gangs: GangSet, harm: Callable[[Events], None] | None = None) -> Failure:
    """Runs gangs that must fail. harm: done once all ranks are in their second step, with the events so far."""
    events: Events = []
    there = set()

    def observe(event: Mapping[str, Any]) -> None:
        events.append(dict(event))
        if event["kind"] == "step" and event["index"] == 1:
            there.add(event["rank"])
        if harm is not None and len(there) == gangs.gangs[0].parallelism.ranks:
            there.clear()
            harm(events)

    with pytest.raises(AttemptError) as caught:
        run(gangs, None, 60, observe)
    await_gone(gangs.folder, 15)
    return caught.value.failure


def await_gone(folder: Path, seconds: float) -> None:
    """Launcher, node parents and ranks: all have the set's folder in their command lines."""
    deadline = time.monotonic() + seconds
    while left := left_of(folder):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def left_of(folder: Path) -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline", "status"])
    alive = [one for one in processes if one.info["status"] != psutil.STATUS_ZOMBIE]
    return [one for one in alive if str(folder) in (one.info["cmdline"] or [])]


def actor_of(events: Events, node: int) -> psutil.Process:
    [pid] = [event["pid"] for event in events if event["kind"] == "node_started" and event["node"] == node]
    actor = psutil.Process(pid).parent()
    assert actor is not None
    return actor


def test_a_gang_ends_well_with_rank_0_on_the_lowest_address(nodes: RayNodes, folder: Path) -> None:
    events: Events = []
    gangs = toy_set(folder, nodes, "sum")
    run(gangs, None, 60, lambda event: events.append(dict(event)))
    assert [event["code"] for event in events if event["kind"] == "rank_exited"] == [0] * 4
    assert {event["node"] for event in events if event["kind"] == "gang_ended"} == {0, 1}
    spec = json.loads((folder / "candidate" / "gang.json").read_text())
    assert spec["master_addr"] == nodes.host(1)  # of those with room
    await_gone(gangs.folder, 5)


def test_a_rank_that_is_killed_is_named(nodes: RayNodes, folder: Path) -> None:
    failure = failure_of(toy_set(folder, nodes, "kill:3"))
    assert (failure.type, failure.rank) == ("rank_killed", 3)


def test_an_actor_that_dies_is_a_lost_node(nodes: RayNodes, folder: Path) -> None:
    failure = failure_of(toy_set(folder, nodes, "hang:1"), lambda events: actor_of(events, 1).kill())
    assert failure.type == "node_lost"
    assert "actor of node 1" in failure.message
    assert nodes.host(2) in failure.message


def test_a_launcher_that_is_killed_leaves_nothing(nodes: RayNodes, folder: Path) -> None:
    gangs = toy_set(folder, nodes, "hang:1")

    def kill_launcher(_events: Events) -> None:
        [launcher] = [one for one in left_of(gangs.folder) if "--address" in " ".join(one.cmdline())]
        launcher.kill()

    failure = failure_of(gangs, kill_launcher)
    assert failure.type == "node_lost"
    assert "code -9" in failure.message


def test_too_few_nodes_are_counted(nodes: RayNodes, folder: Path) -> None:
    began = time.monotonic()
    failure = failure_of(toy_set(folder, nodes, "sum", count=3))
    assert failure.type == "launch_failed"
    assert "needs 3 Ray nodes with 2 CPU each, the cluster has 2 of 3" in failure.message
    assert time.monotonic() - began < 30


def test_a_driver_that_is_killed_leaves_nothing(nodes: RayNodes, folder: Path) -> None:
    """The end of its pipe stops the launcher, and that of the actors' pipes the node parents."""
    folder.mkdir()
    command = [sys.executable, str(DRIVER), str(folder), "hang:1", "60", nodes.address]
    driver = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    files = [folder / "candidate" / f"progress-{rank:05d}.jsonl" for rank in range(4)]
    deadline = time.monotonic() + 90
    while not all(file.exists() and '"index":1' in file.read_text() for file in files):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    driver.kill()
    driver.wait()
    await_gone(folder / "set", 15)


def test_busy_nodes_are_waited_for_within_bounds_and_a_stop_is_in_order(
    nodes: RayNodes, folder: Path
) -> None:
    """A second gang finds no room beside the first, which the signal then ends that a driver gets."""
    first, second = toy_set(folder / "1", nodes, "hang:1"), toy_set(folder / "2", nodes, "sum", wait_s=1)
    found: list[Failure] = []

    def run_second(_events: Events) -> None:
        found.append(failure_of(second))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failure_of(first, run_second)
    assert found[0].type == "launch_failed"
    assert "no place for 2 nodes with 2 CPU each within 1 s; free in all: 0 CPU" in found[0].message
    assert not left_of(first.folder)
    assert "_hang" in (folder / "1" / "candidate" / "rank-00001.log").read_text()


def kill_an_actor_of_the_first_attempt(store: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        files = [*store.glob("cells/*/attempt-001/events.jsonl")]
        lines = [line for file in files for line in file.read_text().splitlines() if '"node_started"' in line]
        started = [json.loads(line) for line in lines]
        if len(started) == 2:
            actor_of(started, 1).kill()
            return
        time.sleep(0.1)


def test_a_cell_passes_on_a_cluster_that_lost_its_first_attempt(nodes: RayNodes, folder: Path) -> None:
    """From the command line, on two nodes of a cluster that the variable names as it does for Ray's own commands."""
    layout = ["parallelism=tp2", "parallelism.nodes=2", "parallelism.gpus_per_node=1"]
    options = ["model=qwen3_tiny", "load_path=cold", "collect=tensors", "wandb.enabled=false", *layout]
    killer = threading.Thread(target=kill_an_actor_of_the_first_attempt, args=[folder])
    killer.start()
    done = orchestrate(folder, "run", "cluster=ray", *options, env={"RAY_ADDRESS": nodes.address})
    killer.join()
    assert done.verdict.get("verdict") == "PASS", done.output
    assert done.cell["attempts"] == 2
    assert "node_lost: tried again" in done.output
    assert not done.left


def test_a_node_that_is_lost_is_named(nodes: RayNodes, folder: Path) -> None:
    failure = failure_of(toy_set(folder, nodes, "hang:1"), lambda _events: nodes.kill(2))
    assert failure.type == "node_lost"
    assert "actor of node 1" in failure.message
    assert nodes.host(2) in failure.message


def test_a_head_that_is_lost_is_named(nodes: RayNodes, folder: Path) -> None:
    """The last of them: the cluster is gone after it."""
    failure = failure_of(toy_set(folder, nodes, "hang:1", count=1), lambda _events: nodes.kill(0))
    assert failure.type == "node_lost"
    assert f"The head of the Ray cluster, {nodes.address}, has not answered" in failure.message


def test_an_address_where_nothing_answers_is_one_sentence(folder: Path) -> None:
    command = ray_launch(RayCluster("127.0.0.1:9", 5), Parallelism(), Backend(), "--check")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    [event] = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert event["type"] == "preflight"
    assert "No Ray cluster at 127.0.0.1:9: nothing answers there. Set cluster.ray.address" in event["message"]
