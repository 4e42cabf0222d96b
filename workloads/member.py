"""One rank as its node parent sees it: started by fork or from nothing, reaped, reported, ended within bounds."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads.processes import catches, describe_state, die_with_parent, family, kill_group
from workloads.spec import GangSpec

STACK_DUMP_S = 0.5  # time given to the ranks to write their stacks
TERMINATE_S = 2.0  # from SIGTERM to SIGKILL
KILL_S = 5.0  # from SIGKILL until a process that still is there is the kernel's
POLL_S = 0.02


class Events:
    """Standard output as a stream of JSON lines; whatever else prints goes to standard error.

    `broken` turns true when nobody listens any more; later events have no reader and are dropped.
    """

    def __init__(self, node: int) -> None:
        self.broken = False
        self._node = node
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def emit(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "node": self._node, "time": time.time(), **values})
        data = line.encode() + b"\n"
        try:
            while data and not self.broken:
                data = data[os.write(self._fd, data) :]
        except BrokenPipeError:
            self.broken = True

    def node_started(self, source: str) -> None:
        """Tells who is speaking. source: the file that runs, by which the driver knows the tree."""
        job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
        self.emit(
            "node_started",
            host=socket.gethostname(),
            pid=os.getpid(),
            step=None if step is None else f"{job}.{step}",
            source=source,
        )

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Member:
    """One running rank. `report` collects what it writes into its failure pipe; `stacks_at` is the size of its
    log when its stacks were asked for, so that they can be found again."""

    rank: int
    pid: int
    log: Path
    pipe: int
    report: bytearray = field(default_factory=bytearray)
    stacks_at: int | None = None

    def drain(self) -> None:
        try:
            while chunk := os.read(self.pipe, 65536):
                self.report += chunk
        except BlockingIOError:
            return

    def error(self) -> dict[str, Any] | None:
        """What the rank said about its failure; None when it said nothing or was killed while it spoke."""
        try:
            return dict(json.loads(self.report)) if self.report else None
        except json.JSONDecodeError:
            return None


def forks(spec: GangSpec) -> bool:
    """Forked ranks share the parent's imported pages. CUDA and vLLM do not survive the fork of a process that
    used them, so their ranks start from nothing."""
    return spec.backend.device == "cpu" and spec.backend.engine != "vllm"


def _fork_rank(gang_file: Path, rank: int, output: int, report: int, events: Events) -> int:
    from workloads.rank import run

    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # here too: whichever of the two comes first
        return pid
    status = 1
    try:
        die_with_parent(signal.SIGKILL, parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        events.close()
        status = run(gang_file, rank, report)
    finally:
        os._exit(status)


def _spawn_rank(gang_file: Path, rank: int, output: int, report: int) -> int:
    command = [sys.executable, "-m", "workloads.rank", str(gang_file), "--rank", str(rank)]
    command += ["--parent", str(os.getpid()), "--report-fd", str(report)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[report], process_group=0
    ).pid


def start_rank(spec: GangSpec, gang_file: Path, rank: int, events: Events) -> Member:
    path = Path(spec.output) / f"rank-{rank:05d}.log"
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    pipe, report = os.pipe()
    sys.stderr.flush()  # a fork copies what is buffered
    if forks(spec):
        pid = _fork_rank(gang_file, rank, output, report, events)
    else:
        pid = _spawn_rank(gang_file, rank, output, report)
    os.close(output)
    os.close(report)
    os.set_blocking(pipe, False)
    events.emit("rank_started", gang=spec.name, rank=rank, pid=pid)
    return Member(rank, pid, path, pipe)


def reap(gang: str, members: dict[int, Member], events: Events, stopped: Callable[[], bool]) -> bool:
    """Reports the members that have ended and forgets them. True while all of those ended well.

    stopped: whether they were told to end, so that how they ended says nothing. Asked after an end is seen, since a
    signal to all processes of a step ends ranks at the same time as it tells the node parent to stop.
    """
    well = True
    for member in list(members.values()):
        member.drain()
        pid, status = os.waitpid(member.pid, os.WNOHANG)
        if pid == 0:
            continue
        member.drain()
        os.close(member.pipe)
        del members[member.rank]
        code = os.waitstatus_to_exitcode(status)
        well &= code == 0
        events.emit(
            "rank_exited",
            gang=gang,
            rank=member.rank,
            code=code if code >= 0 else None,
            signal=signal.Signals(-code).name if code < 0 else None,
            stopped=stopped(),
            error=member.error(),
            stacks_at=member.stacks_at,
        )
    return well


def end_members(gang: str, members: dict[int, Member], events: Events, ordered: bool) -> None:
    """Stacks into the logs, SIGTERM, SIGKILL, each bounded in time. A member that is left then waits in the kernel,
    which does not let it go, and is reported.

    ordered: whether somebody told the gang to stop, before one of its members failed. If not, the member that the
    failed one complained of may be on its way out, its connections closed first: an end before SIGTERM is its own.
    """
    for member in members.values():
        member.stacks_at = member.log.stat().st_size
        _ask_for_stacks(member.pid)
    _reap_for(STACK_DUMP_S, gang, members, events, stopped=lambda: ordered)
    for seconds, number in ((TERMINATE_S, signal.SIGTERM), (KILL_S, signal.SIGKILL)):
        for member in members.values():
            kill_group(member.pid, number)
        _reap_for(seconds, gang, members, events, stopped=lambda: True)
    for rank, member in members.items():
        events.emit("rank_unkillable", gang=gang, rank=rank, pid=member.pid, state=describe_state(member.pid))


def _ask_for_stacks(leader: int) -> None:
    """Of a rank and its descendants; those without a handler would die of the question."""
    for pid in family(leader):
        if catches(pid, signal.SIGUSR1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)


def _reap_for(
    seconds: float, gang: str, members: dict[int, Member], events: Events, stopped: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + seconds
    while members and time.monotonic() < deadline:
        reap(gang, members, events, stopped)
        time.sleep(POLL_S)
