"""Rules of the GPUs that nvidia-smi shows on every node, and of the NVLink domains that they are in. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.nodes.node_records import (
    Expected,
    Json,
    Node,
    Nodes,
    Problem,
    Problems,
    common,
    outside,
    unequal,
)

# Bits of clocks_event_reasons.active that mean a fault of the node, of cooling or power supply. The others: an idle
# GPU (0x1), clocks that somebody chose (0x2, 0x10, 0x100), and the power limit under load (0x4).
THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def health(expected: Expected, nodes: Nodes) -> Problems:
    for node in nodes:
        if node.found.get("gpus") is None:
            continue
        if len(node.gpus) < expected.ranks_per_node:
            text = f"Node {node.name} shows {len(node.gpus)} GPUs, the layout needs {expected.ranks_per_node}"
            yield Problem((node.name,), f"{text}: look for Xid errors in its kernel log.")
        for gpu in node.gpus:
            for text in (*_unhealthy(gpu), *_slow_clock(expected, gpu)):
                yield Problem((node.name,), f"Node {node.name}, GPU {gpu['index']} ({gpu['uuid']}): {text}.")
        for process in node.found["gpus"]["processes"]:
            text = f"process {process['pid']} ({process['process_name']}) uses GPU {process['gpu_uuid']}"
            yield Problem(
                (node.name,), f"Node {node.name}: {text} and is not ours: end it, or share no GPUs."
            )
    counted: list[tuple[str, Callable[[Node], Any]]] = [
        ("the NVIDIA driver", lambda node: common(node.gpus, "driver_version")),
        ("a GPU count of", lambda node: len(node.gpus)),
        ("GPUs of the model", lambda node: common(node.gpus, "name")),
        ("GPU memory in MiB of", lambda node: common(node.gpus, "memory.total")),
        ("a VBIOS", lambda node: common(node.gpus, "vbios_version")),
        ("ECC", lambda node: common(node.gpus, "ecc.mode.current")),
        ("a highest SM clock in MHz of", lambda node: common(node.gpus, "clocks.max.sm")),
    ]
    for what, of in counted:
        yield from unequal([node for node in nodes if "gpus" not in node.errors], what, of)


def _unhealthy(gpu: Json) -> Iterator[str]:
    lost = [f"{value} for {key}" for key, value in gpu.items() if str(value).startswith("[")]
    if lost:  # such as [GPU requires reset]
        yield f"nvidia-smi has {lost[0]} of it: reset it, or the node"
        return
    errors = gpu["ecc.errors.uncorrected.volatile.total"]
    if _is_set(errors):
        yield f"{errors} uncorrected ECC errors since its driver was loaded: reset it, and replace it when they return"
    if _is_set(gpu["remapped_rows.pending"]):
        yield "remapped rows wait for a reset: reset the GPU"
    if _is_set(gpu["remapped_rows.failure"]):
        yield "remapping of a row failed: replace the GPU"
    active = int(gpu["clocks_event_reasons.active"] or "0", 0)
    for bit, name in THROTTLED.items():
        if active & bit:
            yield f"its clocks are held down by {name}: look at cooling and power supply"


def _slow_clock(expected: Expected, gpu: Json) -> Iterator[str]:
    if gpu["clocks.max.sm"] is not None:
        yield from outside(expected, "max_sm_clock", float(gpu["clocks.max.sm"]), "its highest SM clock")


def _is_set(value: str | None) -> bool:
    """Of a count or a flag, which drivers write in two ways."""
    return value is not None and value.lower() not in ("0", "no")


def domains(expected: Expected, nodes: Nodes) -> Problems:
    """All GPUs of a segment in one clique of one NVLink cluster, and registered with it."""
    if not expected.segment:
        return
    found: dict[int, Counter[Any]] = defaultdict(Counter)
    of: dict[str, Any] = {}
    for rank, node in enumerate(nodes):
        for gpu in node.gpus:
            fabric = gpu["fabric"]
            if (fabric.get("state"), fabric.get("status")) != ("Completed", "Success"):
                state = f"state {fabric.get('state')}, status {fabric.get('status')}"
                text = f"Node {node.name}, GPU {gpu['index']} is in no NVLink domain (fabric {state})"
                yield Problem((node.name,), f"{text}: look at the IMEX service and fabric manager there.")
        if node.gpus:
            of[node.name] = tuple(common([g["fabric"] for g in node.gpus], k) for k in _PLACE)
            found[rank // expected.segment][of[node.name]] += 1
    for rank, node in enumerate(nodes):
        usual, count = found[rank // expected.segment].most_common(1)[0] if node.name in of else (None, 0)
        if node.name in of and of[node.name] != usual:
            text = f"Node {node.name} is in NVLink domain {_domain(of[node.name])}, {count} others of its segment"
            text += f" of {expected.segment} nodes are in {_domain(usual)}: an EP group must stay in one"
            yield Problem((node.name,), f"{text}; ask for the segment, or set cluster.segment=false.")


_PLACE = ("clusteruuid", "cliqueid")


def _domain(place: Any) -> str:
    return f"{place[0]} clique {place[1]}"
