"""Tells from inside a process that it lives and that its work goes on: two counters in a small file, replaced in place.

The first counts the beats of a thread. It stands still when the process is stopped, waits in the kernel without end, or
some call keeps the interpreter's lock. The second counts units of work, noted where work is done: a tensor read, a
module post-processed, a forward pass, a record written. It also stands still when the process only waits, for example
in a collective that another one never enters; then the first goes on. Readers compare what they read with what they
read before: no clock of this machine takes part. Standard library only.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEAT_S = 2.0
_WIDTH = 20  # digits of a counter: all contents have one length, so that none is ever cut off or left over

log = logging.getLogger(__name__)

_units = 0


def advance() -> None:
    """Notes that one more unit of this process's work is done."""
    global _units
    _units += 1


def beat_file(folder: Path, rank: int) -> Path:
    """Of the process whose first rank is `rank`."""
    return folder / f"heartbeat-{rank:05d}"


def worker_file(folder: Path, rank: int, pid: int | str) -> Path:
    """Of the process that an engine has started for one rank. Its pid is told to whoever looks at its stacks."""
    return folder / f"{beat_file(folder, rank).name}-worker-{pid}"


def find_worker(folder: Path, rank: int) -> tuple[Path, int] | None:
    """File and pid of a rank's worker that beats or did; None where there is none."""
    path = next(folder.glob(worker_file(folder, rank, "*").name), None)
    return None if path is None else (path, int(path.name.rpartition("-")[2]))


def read(path: Path) -> tuple[int, int] | None:
    """(beats, units of work) as last written; None where there is no such file yet, or it cannot be read now."""
    try:
        beats, units = map(int, path.read_bytes().split())
    except (OSError, ValueError):  # not there; or a write in the making
        return None
    return beats, units


@contextmanager
def beating(path: Path) -> Iterator[None]:
    """Beats into `path` while the block runs."""
    stop = threading.Event()
    thread = threading.Thread(target=_beat, args=(path, stop), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(BEAT_S)  # a file system may hold it for ever


def _beat(path: Path, stop: threading.Event) -> None:
    beats, told = 0, False
    while True:
        beats += 1
        try:
            _write(path, f"{beats:0{_WIDTH}d} {_units:0{_WIDTH}d}\n".encode())
        except OSError as error:  # the work may go on, and fails by itself where it needs the disk
            if not told:
                log.warning("heartbeats cannot be written to %s: %s", path, error)
            told = True
        if stop.wait(BEAT_S):
            return


def _write(path: Path, content: bytes) -> None:
    """Opened each time: on a network file system others see what was written when the file is closed."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, content, 0)
    finally:
        os.close(file)
