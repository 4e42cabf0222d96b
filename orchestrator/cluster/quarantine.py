"""Nodes that failed, which the next submissions avoid for some time: `<store>/quarantine.jsonl`, which only grows.

A line: {node, type, message, cell, attempt, time, until}. type: of the failure; time, until: seconds of the Unix
clock. The last line of a node counts; one whose `until` has passed frees the node.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.cluster.attempts import HANG
from orchestrator.store import Store

FILE = "quarantine.jsonl"
# Failures that say which node is bad, and not only which node saw the failure of another.
NODE_FAULTS = {"node_lost", "node_failed", "boot_failed", "gpu_failed", "bad_node"}
SUSPECTED_S = 300.0  # how long the node is avoided that a hang began on: until the cell is submitted again


def add(store: Store, node: str, error: Mapping[str, Any], attempt: Path, seconds: float) -> None:
    """error: of the attempt's result."""
    now = time.time()
    line = {
        "node": node,
        "type": error["type"],
        "message": error["message"],
        "cell": attempt.parent.name,
        "attempt": attempt.name,
        "time": now,
        "until": now + seconds,
    }
    # One write of one line, so that lines of several writers do not mix.
    descriptor = os.open(store.root / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entries(store: Store) -> list[dict[str, Any]]:
    """All lines, oldest first. A last line that was cut short is left out."""
    try:
        text = (store.root / FILE).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


def nodes(store: Store, now: float | None = None) -> list[str]:
    """Names of the nodes to avoid at `now`, sorted."""
    last = {line["node"]: line["until"] for line in entries(store)}
    moment = time.time() if now is None else now
    return sorted(node for node, until in last.items() if until > moment)


def suspected(error: Mapping[str, Any] | None) -> list[str]:
    """Nodes that may have caused an attempt's error, or the program did."""
    is_hang = error is not None and error["type"] == HANG and isinstance(error["node"], str)
    return [error["node"]] if error is not None and is_hang else []


def at_fault(error: Mapping[str, Any] | None) -> list[str]:
    """Nodes that an attempt's error names as the bad ones."""
    if error is None or error["type"] not in NODE_FAULTS or not isinstance(error["node"], str):
        return []
    return error["node"].split(",")
