"""Writes down, from outside, where the processes of a hung gang are: what the kernel says, and their stacks by py-spy.

It needs nothing of them: a process is read that is stopped, waits in the kernel, or keeps the interpreter's lock inside
native code. Without py-spy the ranks' own faulthandler is all there is, which asks every rank to run.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workloads.processes import describe_state, family, is_held

TOOL = "PY_SPY"  # variable with a path: an engine's own environment seldom has the tool
DUMP_S = 20.0  # for all processes of a node together

log = logging.getLogger(__name__)


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank:05d}.txt"


def find_tool() -> str | None:
    """py-spy: on PATH, beside this interpreter, or the one that the driver found on its own."""
    beside = str(Path(sys.executable).with_name("py-spy"))
    places = (shutil.which("py-spy"), beside, os.environ.get(TOOL))
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def dump(leaders: Mapping[int, int], folder: Path, first: Sequence[int]) -> None:
    """One file for each rank and its descendants, within DUMP_S. leaders: pid by rank. first: ranks whose turn comes
    before that of others; what there is no time for is written without stacks."""
    tool, deadline = find_tool(), time.monotonic() + DUMP_S
    order = sorted(leaders, key=lambda rank: (rank not in first, rank))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        told = {
            rank: [pool.submit(_describe, pid, tool, deadline) for pid in family(leaders[rank])]
            for rank in order
        }
        for rank, texts in told.items():
            stacks_file(folder, rank).write_text("\n".join(text.result() for text in texts))


def _describe(pid: int, tool: str | None, deadline: float) -> str:
    try:
        process = Path("/proc") / str(pid)
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        held = is_held(pid)
    except OSError as error:
        return f"process {pid}: {error}\n"
    kernel = _read(process / "stack") or _read(process / "wchan")  # the first is for root
    head = f"process {pid}: {command}\nit {describe_state(pid)}\nin the kernel:\n{kernel}\n"
    return head + _spy(pid, held, tool, deadline)


def _read(file: Path) -> str:
    try:
        return file.read_text().rstrip()
    except OSError:
        return ""


def _spy(pid: int, held: bool, tool: str | None, deadline: float) -> str:
    if tool is None:
        return f"py-spy is neither on PATH nor beside {sys.executable}: see the end of the rank's log.\n"
    how = "--nonblocking" if held else "--native"
    command = [tool, "dump", how, "--full-filenames", "--pid", str(pid)]
    left = deadline - time.monotonic()
    if left <= 0:
        return f"no time was left for {' '.join(command)}\n"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("no stacks of process %d: %s", pid, error)
        return f"{error}\n"
    return done.stdout + done.stderr
