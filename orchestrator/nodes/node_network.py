"""Rules of what joins the nodes: their view of the run store, their clocks, and the network. Pure."""

from collections.abc import Iterator
from math import comb

from orchestrator.nodes.node_records import (
    Expected,
    Json,
    Node,
    Nodes,
    Problem,
    Problems,
    cause,
    culprits,
    outside,
)


def files(expected: Expected, nodes: Nodes) -> Problems:
    wrote = {rank: node for rank, node in enumerate(nodes) if "files" in node.found}
    unseen = {
        frozenset((node.name, wrote[other].name))
        for rank, node in wrote.items()
        for other, late in enumerate(node.found["files"]["visible_s"])
        if late is None and other in wrote and other != rank
    }
    for names in culprits(unseen, comb(len(wrote), 2)):
        text = f"Nodes do not see the files that others write in the run store, which {cause(names)} explains"
        yield Problem(names, f"{text}: mount its file system there, or set another store=.")
    for node in nodes:
        found = node.found.get("files")
        if found is not None:
            late = max((seconds for seconds in found["visible_s"] if seconds is not None), default=0.0)
            for key, value, what in (
                ("write_latency", found["write_s"], "a small file in the run store takes"),
                ("visible_after", late, "files of other nodes are visible after"),
            ):
                for text in outside(expected, key, value, what):
                    yield Problem((node.name,), f"On node {node.name} {text}.")


def clocks(expected: Expected, nodes: Nodes) -> Problems:
    for node, offset in offsets(nodes):
        for text in outside(
            expected, "clock_skew", abs(offset), f"its distance from that of {nodes[0].name}"
        ):
            yield Problem((node.name,), f"The clock of node {node.name}: {text}. Look at its time service.")


def offsets(nodes: Nodes) -> list[tuple[Node, float]]:
    """Of every node that the first one reached."""
    first = sorted(nodes[0].pairs.items()) if nodes else []
    return [(nodes[other], pair["clock"]["offset_s"]) for other, pair in first if pair and pair["clock"]]


def network(expected: Expected, nodes: Nodes) -> Problems:
    unmet = {
        frozenset((nodes[0].name, node.name)) for node in nodes[1:] if node.errors.keys() & {"meet", "rounds"}
    }
    unmet |= {frozenset((n.name, nodes[o].name)) for n in nodes for o in n.found.get("meet") or ()}
    unmet |= {
        frozenset((n.name, nodes[o].name)) for n in nodes for o, pair in n.pairs.items() if pair is None
    }
    said = next((text for node in nodes for text in node.errors.values()), "")
    for names in culprits(unmet, comb(len(nodes), 2)):
        text = f"Nodes do not reach one another over the network, which {cause(names)} explains ({said})"
        yield Problem(names, f"{text}: look at its interfaces, and at what is open between the nodes.")
    if not unmet:
        slow = list(_slow_pairs(expected, nodes))
        yield from slow
        if not slow:
            yield from _slow_whole(expected, nodes)


def _slow_pairs(expected: Expected, nodes: Nodes) -> Problems:
    """By node: a pair does not say which of its two is slow, several pairs of one node do."""
    judged = [
        (frozenset((node.name, nodes[other].name)), measured["bandwidth"])
        for rank, node in enumerate(nodes)
        for other, measured in node.pairs.items()
        # Segments are joined by the network alone, which the bounds of a domain are not made for.
        if measured is not None and _segment(expected, rank) == _segment(expected, other)
    ]
    texts = {
        pair: text
        for pair, bandwidth in judged
        for text in _pair_outside(expected, " with ".join(sorted(pair)), bandwidth)
    }
    count = len({pair for pair, _ in judged})
    for names in culprits(set(texts), count):
        own = [text for pair, text in texts.items() if not names or pair & set(names)]
        text = f"{len(own)} of {count} pairs are out of bounds, which {cause(names)} explains"
        yield Problem(names, f"{text}: {own[0]}.")


def _segment(expected: Expected, rank: int) -> int:
    return rank // expected.segment if expected.segment else 0


def _pair_outside(expected: Expected, who: str, bandwidth: Json) -> Iterator[str]:
    for device, measured in bandwidth.items():
        for kind, value in measured.items():
            yield from outside(expected, f"pair_{kind}", value, f"the {kind} of {who} over {device} has")


def _slow_whole(expected: Expected, nodes: Nodes) -> Problems:
    for device, measured in (nodes[0].found.get("whole") or {"bandwidth": {}})["bandwidth"].items():
        for kind, value in measured.items():
            for text in outside(
                expected, kind, value, f"the {kind} of all {len(nodes)} nodes over {device} has"
            ):
                yield Problem((), f"{text[:1].upper()}{text[1:]}, and no pair of nodes explains it.")
    for node in nodes:
        if "whole" in node.errors:
            yield Problem((), f"A collective of all nodes failed on {node.name}: {node.errors['whole']}.")
            return
