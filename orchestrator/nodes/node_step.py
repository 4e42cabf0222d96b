"""Preflight over the nodes of an allocation: one step that runs on all of them, whose reports are then judged."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.cell import Cell
from orchestrator.cluster.sbatch import segment_nodes
from orchestrator.failure import AttemptError
from orchestrator.gangs import gang
from orchestrator.gangs.launch import Allocation, GangSet, free_port, master_address
from orchestrator.nodes import node_check
from orchestrator.nodes.node_records import Expected, Problem, read_events
from orchestrator.provenance import checkout, source_hash
from orchestrator.staging import interpreter
from orchestrator.starts import ARMS
from orchestrator.store import Store, read_json, write_json
from orchestrator.trees import source_tree
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step

FOLDER = "preflight"
START_S = 300  # from the first node's start to the last one's: interpreters come from a shared file system
SURVIVORS_S = 60  # for the nodes that are left to say that one is gone
ENDED_BY_NODES = {"node_lost", "node_failed", "launch_failed", "connection_lost", "hang"}


class Listener(Protocol):
    def take(self, record: Mapping[str, Any]) -> None: ...

    def phase(self, text: str) -> None: ...


def check_nodes(
    cell: Cell, store: Store, attempt: Path, allocation: Allocation | None, listener: Listener
) -> gang.Waiting | None:
    """Adds what was found to provenance.json. Without GPUs and other nodes there is nothing to learn: the driver has
    looked at its own machine. Nor on a Ray cluster of others, which tells the nodes of a gang as it starts there.

    Returns the node parents that have made the check and can run the gangs, which saves them the import of torch.
    Raises AttemptError: `bad_node` names the nodes at fault, `preflight` is a problem that no node explains; and how
    the step ended, where the nodes reported nothing that says more.
    """
    one_node = allocation is None or cell["parallelism"]["nodes"] == 1
    if cell["cluster"]["kind"] == "ray" or (one_node and cell["backend"]["device"] == "cpu"):
        return None
    expected, step = _expected(cell, allocation), _step(cell, store, attempt / FOLDER, allocation)
    events: list[Mapping[str, Any]] = []

    def take(event: Mapping[str, Any]) -> None:
        if event["kind"] != "standing":  # which is of gangs that run steps of a scenario
            events.append(event)
            listener.take(event)

    ended, waiting = None, None
    try:
        waiting = gang.run(step, allocation, float(cell["policy"]["step_timeout_s"]), take)
    except AttemptError as error:
        if error.failure.type not in ENDED_BY_NODES:
            raise
        ended = error
    try:
        _judge(expected, events, ended, attempt, listener)
    except BaseException:
        if waiting is not None:
            waiting.close()
        raise
    return waiting


def _judge(
    expected: Expected,
    events: Sequence[Mapping[str, Any]],
    ended: AttemptError | None,
    attempt: Path,
    listener: Listener,
) -> None:
    """ended: how the step did, where that was not in order. Raises AttemptError."""
    nodes = read_events(expected, events)
    for rank, node in enumerate(nodes):
        write_json(attempt / FOLDER / f"node-{rank:05d}.json", vars(node))
    if ended is not None and not any(node.found for node in nodes):
        raise ended
    found = node_check.problems(expected, nodes)
    if found:
        raise _refusal(found, ended)
    if ended is not None:
        raise ended
    summary = node_check.summary(nodes)
    for text in summary["warnings"]:
        listener.phase(text)
    path = attempt / "provenance.json"
    write_json(path, {**read_json(path), "preflight": summary})


def _refusal(problems: Sequence[Problem], ended: AttemptError | None) -> AttemptError:
    names = sorted({name for problem in problems for name in problem.nodes})
    kind = "bad_node" if names else "preflight"
    log_tail = ended.failure.log_tail if ended is not None else ""
    text = " ".join(problem.text for problem in problems)
    return AttemptError(kind, text, node=",".join(names) or None, log_tail=log_tail)


def _expected(cell: Cell, allocation: Allocation | None) -> Expected:
    layout, cluster = cell["parallelism"], cell["cluster"]
    bounds = cluster.get("preflight", {})  # cells from before there were any have none
    if allocation is None:
        return Expected([socket.gethostname()], layout["nodes"] * layout["gpus_per_node"], bounds)
    segment = segment_nodes(layout) if cluster["segment"] else 0
    return Expected(allocation.hosts[: layout["nodes"]], layout["gpus_per_node"], bounds, segment)


def _step(cell: Cell, store: Store, folder: Path, allocation: Allocation | None) -> GangSet:
    """Started as gangs are. It runs from the tree of the arm that comes first, and its nodes stay for its gangs, where
    that is what this driver has itself; else from this driver's, since an arm's may be older than this check."""
    layout, cluster = Parallelism(**cell["parallelism"]), cell["cluster"]
    steps = [Step("check", name="nodes")]
    spec = GangSpec(FOLDER, str(folder), Model(), layout, Backend(**cell["backend"]), {}, {}, steps)
    nodes = 1 if allocation is None else layout.nodes
    trees = {source_tree(arm, store) for arm in cell["code"].values() if arm is not None}
    seen = [store.root, *sorted(tree for tree in trees if not tree.is_relative_to(store.root))]
    options: dict[str, Any] = {
        "nodes": nodes,
        "device": cell["backend"]["device"],
        "meet": f"{master_address(allocation)}:{free_port()}",
        "grace": cluster["lost_after_s"],
        # The nodes of a container start when each has its image, which takes as long as it takes.
        "limit": START_S if cluster["image"] is None else cell["policy"]["step_timeout_s"],
    }
    first = next(arm for name in ARMS if (arm := cell["code"][name]) is not None)
    is_own = first["source"] == source_hash(checkout())
    has_network = bool(cluster.get("preflight", {}).get("network", True))
    stays = is_own and has_network and allocation is not None and cluster["image"] is None
    return GangSet(
        folder,
        [spec],
        source_tree(first, store) if is_own else checkout(),
        parents=nodes,
        python=interpreter(cell, "candidate"),
        environment=cluster["env"],
        image=cluster["image"],
        mounts=[f"{path}:{path}" for path in seen] + cluster["mounts"],
        program=(
            "workloads.preflight",
            *(f"--{name}={value}" for name, value in options.items()),
            *(f"--source={tree}" for tree in sorted(trees)),
            *([] if has_network else ["--no-network"]),
            *(["--stay"] if stays else []),
        ),
        survivors_s=SURVIVORS_S,
        stays=stays,
    )
