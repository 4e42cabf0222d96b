"""Finds the shared memory of processes before they are killed, and removes what nobody removes after that.

A library that is killed cannot unlink its segments, and on a node without room in /dev/shm the next engine fails.
"""

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from workloads.processes import processes

FOLDER = Path("/dev/shm")

log = logging.getLogger(__name__)


def used_by(pids: Iterable[int], folder: Path = FOLDER) -> set[Path]:
    """Files in `folder` that the processes have mapped or open. What only a process that has ended used is not known
    any more."""
    return {path for pid in pids for path in _held(pid, folder)}


def remove_left(files: Iterable[Path], folder: Path = FOLDER) -> list[Path]:
    """Removes those of the files that no process uses; returns them."""
    left = {path for path in files if path.exists()}
    if left:
        left -= used_by(processes(), folder)
    for path in left:
        log.info("removing shared memory that nobody uses any more: %s", path)
        path.unlink(missing_ok=True)
    return sorted(left)


def _held(pid: int, folder: Path) -> set[Path]:
    """Empty for a process that is gone or another user's."""
    process = Path("/proc") / str(pid)
    names = []
    with contextlib.suppress(OSError):
        names = ["/" + line.partition("/")[2] for line in (process / "maps").read_text().splitlines()]
        for one in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                names.append(os.readlink(one))
    paths = {Path(name) for name in names if not name.endswith(" (deleted)")}
    return {path for path in paths if folder in path.parents}
