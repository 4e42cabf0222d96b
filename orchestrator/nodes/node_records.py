"""What the nodes of an allocation reported before anything ran, and what rules about it share. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """nodes: names, in the order of node ranks. bounds: of `cluster.preflight`. segment: nodes, one after the other,
    that must share an NVLink domain; 0: it is not asked for."""

    nodes: Sequence[str]
    ranks_per_node: int
    bounds: Mapping[str, Json] = field(default_factory=dict)
    segment: int = 0


@dataclass(frozen=True)
class Problem:
    """nodes: those at fault, none where nothing says which."""

    nodes: tuple[str, ...]
    text: str


@dataclass
class Node:
    """What one node reported. found: by stage. pairs: by the partner's node rank, None where it was not reached."""

    name: str
    found: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    pairs: dict[int, Json | None] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """How many it has reported."""
        return len(self.found) + len(self.errors.keys() - {"pair"}) + len(self.pairs)

    @property
    def gpus(self) -> Sequence[Json]:
        return self.found["gpus"]["gpus"] if self.found.get("gpus") else ()


Nodes = Sequence[Node]
Problems = Iterator[Problem]


def read_events(expected: Expected, events: Sequence[Json]) -> list[Node]:
    """Events `node_check` by node."""
    nodes = [Node(name) for name in expected.nodes]
    for event in events:
        if event["kind"] == "node_check":
            node = nodes[event["node"]]
            if event["stage"] == "pair":
                node.pairs[event["peer"]] = event["found"]
            elif event["error"] is None:
                node.found[event["stage"]] = event["found"]
            if event["error"] is not None:
                node.errors[event["stage"]] = event["error"]
    return nodes


def unequal(nodes: Nodes, what: str, of: Callable[[Node], Any]) -> Problems:
    """Nodes whose value is not that of most; where as many have one as the other, that of the first node counts."""
    values = [(node, of(node)) for node in nodes if "machine" in node.found]
    counts = Counter(value for _, value in values)
    if len(counts) < 2:
        return
    usual = max(counts, key=lambda value: (counts[value], value == values[0][1]))
    for node, value in values:
        if value != usual:
            text = f"Node {node.name} has {what} {value}, {counts[usual]} of {len(values)} nodes have {usual}"
            yield Problem((node.name,), f"{text}: install the same there.")


def common(gpus: Sequence[Json], key: str) -> str:
    return ", ".join(sorted({str(gpu.get(key)) for gpu in gpus})) or "none"


def culprits(bad: set[frozenset[str]], judged: int) -> list[tuple[str, ...]]:
    """Nodes that explain the bad ones of `judged` pairs: the node in most of them, then of those that are left. Of a
    pair that no other pair tells more about, both: which of the two it is cannot be known. Of none, where all pairs
    are bad: then it is what they share."""
    if 1 < judged == len(bad):
        return [()]
    found: list[tuple[str, ...]] = []
    left = sorted(map(sorted, bad))
    while left:
        worst, count = Counter(name for pair in left for name in pair).most_common(1)[0]
        found.append((worst,) if count > 1 else tuple(left[0]))
        left = [pair for pair in left if not set(pair) & set(found[-1])]
    return found


def cause(names: Sequence[str]) -> str:
    return " or ".join(f"node {name}" for name in names) or "no single node"


def outside(expected: Expected, key: str, value: float, what: str) -> Iterator[str]:
    """A sentence without its full stop where a measurement leaves the bounds of `cluster.preflight.KEY`."""
    bound = expected.bounds.get(key)
    if bound is None:
        return
    for side, word, sign in (("low", "less", 1), ("high", "more", -1)):
        limit = bound[side]
        if limit is not None and sign * value < sign * limit:
            unit = bound["unit"]
            yield f"{what} {value:.3g} {unit}, {word} than cluster.preflight.{key}.{side}={limit:g} {unit}"
