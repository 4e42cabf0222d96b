"""Linux process hygiene for gangs: nothing outlives its parent, everything that is left is found and ended."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {argument}) failed: {os.strerror(code)}")


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """The kernel sends `number` to this process when process `parent` dies.

    The parent may have died before the request was in place; then this process already belongs to another
    one, and it ends itself the same way.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Descendants whose own parent dies become children of this process instead of escaping to process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Pids of the living (not zombie) children of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold spaces and parentheses; state and parent follow its last one.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended between the listing and the read
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(entry.name))
    return found


def kill_group(leader: int, number: signal.Signals) -> None:
    """Signals the process group of `leader`; one that is already gone is what the caller wants."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def kill_children() -> None:
    """Ends and reaps every child of this process, adopted ones included."""
    while left := children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # not yet reaped, so the pid is still theirs
        for pid in left:
            os.waitpid(pid, 0)
