"""Whether the nodes see one another's files, and how late. Standard library."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.02


def exchange(folder: Path, node: int, nodes: int, grace_s: float) -> dict[str, Any]:
    """Writes this node's token and waits for those of all.

    {"write_s": from its creation to the end of its fsync, "visible_s": by node, since the own one was written, None
    where a node's token was not there after `grace_s`}. Raises OSError when the folder takes no file.
    """
    began = time.monotonic()
    _write(folder / _name(node), str(node))
    written = time.monotonic()
    seen: list[float | None] = [None] * nodes
    while None in seen:
        for other in _absent(seen):
            if _holds(folder / _name(other), str(other)):
                seen[other] = time.monotonic() - written
        if time.monotonic() - written > grace_s:
            break
        time.sleep(POLL_S if None in seen else 0)
    return {"write_s": written - began, "visible_s": seen}


def _absent(seen: Sequence[float | None]) -> list[int]:
    return [node for node, seconds in enumerate(seen) if seconds is None]


def _name(node: int) -> str:
    return f"token-{node:05d}"


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _holds(path: Path, text: str) -> bool:
    """Opened each time, since a name may be visible before its content, and a listing may be an old one."""
    try:
        return path.read_text() == text
    except FileNotFoundError:
        return False
