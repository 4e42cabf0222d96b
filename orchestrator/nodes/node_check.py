"""Judges what the nodes of an allocation reported before anything ran: which of them are unfit, and why. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.nodes import node_gpus, node_network
from orchestrator.nodes.node_records import Expected, Json, Node, Nodes, Problem, Problems, unequal

SKEW_S = 2.0  # between clocks, from where on a reader of records from several nodes has to know of it
Rule = Callable[[Expected, Nodes], Problems]


def problems(expected: Expected, nodes: Nodes) -> list[Problem]:
    """All of them. Where a node died, what the others say of the network follows from that, and is left out."""
    alive = all("done" in node.found for node in nodes)
    return [problem for rule in (*OWN, *(BETWEEN if alive else ())) for problem in rule(expected, nodes)]


def warnings(nodes: Nodes) -> list[str]:
    """What does not make a node unfit, and a reader must know."""
    return [
        f"The clock of node {node.name} is {offset:+.1f} s from the one of node {nodes[0].name}: times in the records "
        "of the two do not compare."
        for node, offset in node_network.offsets(nodes)
        if abs(offset) > SKEW_S
    ]


def summary(nodes: Nodes) -> dict[str, Any]:
    """Of provenance: what the nodes are, by name, and the warnings."""
    stages = ("machine", "gpus", "versions", "files", "whole")
    return {
        "nodes": {node.name: {stage: node.found.get(stage) for stage in stages} for node in nodes},
        "clock_offset_s": {node.name: offset for node, offset in node_network.offsets(nodes)},
        "warnings": warnings(nodes),
    }


def _silent(expected: Expected, nodes: Nodes) -> Problems:
    """Nodes that did not come to the end. The step ends those that wait for one that is gone: it is the one that came
    less far."""
    silent = [node for node in nodes if "done" not in node.found]
    least = min((node.stages for node in silent), default=0)
    for node in silent:
        if node.stages == least:
            how = f"ended in its check after {least} reports" if least else "did not begin its check"
            text = f"Node {node.name} {how}: see preflight/node.log, and the kernel's log on the node."
            if not least:
                text += " It must see the run store, which has the code of the check."
            yield Problem((node.name,), text)


def _placement(expected: Expected, nodes: Nodes) -> Problems:
    hosts: dict[str, str] = {}
    for rank, node in enumerate(nodes):
        machine = node.found.get("machine")
        if machine is None:
            continue
        low, high = rank * expected.ranks_per_node, (rank + 1) * expected.ranks_per_node
        if machine["ranks"] != f"{low}:{high}":
            text = f"Node {node.name} was to run ranks {low}:{high}, Slurm's step gave it {machine['ranks']}."
            yield Problem((node.name,), f"{text} Look at the step's options in driver.log.")
        if machine["slurm_node"] not in (None, node.name):
            text = f"Node rank {rank} was to run on {node.name}, Slurm placed it on {machine['slurm_node']}."
            yield Problem((node.name,), f"{text} Look at the step's options in driver.log.")
        if machine["host"] in hosts:
            text = f"Nodes {hosts[machine['host']]} and {node.name} are the same host, {machine['host']}."
            yield Problem((node.name,), f"{text} Its ranks would share GPUs and memory: repair its name.")
        hosts.setdefault(machine["host"], node.name)


def _machines(expected: Expected, nodes: Nodes) -> Problems:
    for node in nodes:
        for stage in ("machine", "gpus", "versions", "files"):
            if stage in node.errors:
                text = f"Node {node.name} failed in its stage {stage!r}: {node.errors[stage]}."
                yield Problem((node.name,), f"{text} See preflight/node.log.")
    yield from unequal(nodes, "Python", lambda n: n.found.get("machine", {}).get("python"))
    yield from _each(nodes, lambda n: n.found.get("machine", {}).get("packages", {}), "{}")
    yield from _each(nodes, lambda n: n.found.get("machine", {}).get("sources", {}), "the source tree {}")
    yield from _each(nodes, lambda n: n.found.get("versions", {}), "the loaded library {}")


def _each(nodes: Nodes, of: Callable[[Node], Json], name: str) -> Problems:
    for key in sorted({key for node in nodes for key in of(node)}):

        def value(node: Node, key: str = key) -> Any:
            return of(node).get(key, "not there")

        yield from unequal(nodes, name.format(key), value)


OWN: Sequence[Rule] = (_silent, _placement, _machines, node_gpus.health, node_gpus.domains)
BETWEEN: Sequence[Rule] = (node_network.files, node_network.clocks, node_network.network)
