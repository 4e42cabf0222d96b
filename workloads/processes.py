"""Linux process hygiene for gangs: nothing outlives its parent, everything that is left is found and ended."""

import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PROC = Path("/proc")
# By the letter that /proc has.
_STATES = {
    "D": "waits in the kernel, which does not let it go",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended and was not reaped",
}
_GONE = (FileNotFoundError, ProcessLookupError)  # a process ended between two looks


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


def allow_debugger(pid: int) -> None:
    """Process `pid` and those that it starts may read this one's stacks, also where the kernel's Yama module lets
    nobody but ancestors do so (kernel.yama.ptrace_scope=1)."""
    try:
        _prctl(_PR_SET_PTRACER, pid)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without the module: there is nothing to allow
            raise


def processes() -> Iterator[int]:
    """Pids of this machine, as far as they can be seen from here."""
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def state_of(pid: int) -> tuple[str, int]:
    """(letter of the state, parent's pid), as /proc has them. Raises FileNotFoundError or ProcessLookupError when it is
    gone."""
    # The command name may hold spaces and parentheses; state and parent follow its last one.
    state, parent = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def is_held(pid: int) -> bool:
    """Whether a debugger cannot make the process stop: it does not run, and must be read as it is. Raises as
    `state_of`."""
    return state_of(pid)[0] in "DTt"


def describe_state(pid: int) -> str:
    """What a process does, as a verb with its object."""
    try:
        state, _parent = state_of(pid)
    except _GONE:
        return "is gone"
    return f"{_STATES.get(state, 'runs or waits')} (state {state})"


def _living() -> dict[int, int]:
    """Pid to parent's pid, without zombies."""
    found = {}
    for pid in processes():
        try:
            state, parent = state_of(pid)
        except _GONE:
            continue
        if state != "Z":
            found[pid] = parent
    return found


def children() -> list[int]:
    """Pids of the living (not zombie) children of this process."""
    return [pid for pid, parent in _living().items() if parent == os.getpid()]


def family(pid: int) -> list[int]:
    """The process and its living descendants, itself first, each before its own children."""
    parents, found = _living(), [pid]
    for member in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == member]
    return found


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except _GONE:
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def kill_group(leader: int, number: signal.Signals) -> None:
    """Signals the process group of `leader`; one that is already gone is what the caller wants."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def kill_children(seconds: float) -> None:
    """Ends and reaps every child of this process, adopted ones included. Those that the kernel does not let go within
    `seconds` are left to it."""
    deadline = time.monotonic() + seconds
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # not yet reaped, so the pid is still theirs
        time.sleep(0.01)
        _reap_all()


def _reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:  # none is left
        return
