"""Parent of the ranks of one node: imports torch once, runs the gangs of a set in order, reports every exit.

`python -m workloads.node SET --node-rank I --ranks LO:HI` reads `SET/gangs.json`, a list of gang files, and
writes one JSON event per line to standard output, where the driver (or a person) listens. With `--attended` the
end of standard input is the order to stop, given by the driver or by its death; SIGTERM is the same order. Then,
and when a rank fails, the stacks of the ranks go into their logs before they are ended.
"""

import argparse
import gc
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from workloads.processes import adopt_orphans, die_with_parent, kill_children, kill_group
from workloads.spec import GangSpec

STACK_DUMP_S = 0.5  # time given to the ranks to write their stacks
TERMINATE_S = 2.0  # from SIGTERM to SIGKILL
POLL_S = 0.02

log = logging.getLogger(__name__)


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

    def close(self) -> None:
        os.close(self._fd)


class StopOrder:
    """Whether the gangs are to stop. Not an exception: the order may come while ranks are being ended.

    attended: a listener holds the other end of standard input, and its end is an order too. Slurm's own signals
    are no way to give one: they reach the ranks as well, which die before their stacks are known.
    """

    def __init__(self, attended: bool) -> None:
        self._attended = attended
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def given(self) -> bool:
        while self._attended and not self._signalled and select.select([0], [], [], 0)[0]:
            self._signalled = not os.read(0, 4096)
        return self._signalled


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


def preload(spec: GangSpec) -> None:
    """Imports once, before any fork, what every rank would import."""
    import torch

    from workloads.rank import engine_class

    torch.set_num_threads(1)
    engine_class(spec.backend.engine)
    if spec.trace:
        import_module("torch._dynamo")  # a dispatch mode loads it at its first use, for 2 s of each rank
    gc.collect()
    gc.freeze()  # else a collection in a rank touches, and so copies, every shared page


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


def reap(gang: str, members: dict[int, Member], events: Events, stopped: bool) -> bool:
    """Reports the members that have ended and forgets them. True while all of those ended well.

    stopped: they were told to end, so how they ended says nothing.
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
            stopped=stopped,
            error=member.error(),
            stacks_at=member.stacks_at,
        )
    return well


def end_members(gang: str, members: dict[int, Member], events: Events) -> None:
    """Stacks into the logs, SIGTERM, SIGKILL, each bounded in time; then none of the members is left."""
    for member in members.values():
        member.stacks_at = member.log.stat().st_size
        kill_group(member.pid, signal.SIGUSR1)
    for seconds, number in ((STACK_DUMP_S, signal.SIGTERM), (TERMINATE_S, signal.SIGKILL)):
        _reap_for(seconds, gang, members, events)
        for member in members.values():
            kill_group(member.pid, number)
    _reap_for(math.inf, gang, members, events)


def _reap_for(seconds: float, gang: str, members: dict[int, Member], events: Events) -> None:
    deadline = time.monotonic() + seconds
    while members and time.monotonic() < deadline:
        reap(gang, members, events, stopped=True)
        time.sleep(POLL_S)


def run_gang(spec: GangSpec, gang_file: Path, ranks: range, events: Events, order: StopOrder) -> bool:
    """Runs this node's members to their end. False when one failed, a stop was ordered or the driver is gone."""
    members: dict[int, Member] = {}
    well = True
    try:
        for rank in ranks:
            members[rank] = start_rank(spec, gang_file, rank, events)
        while members and well and not order.given() and not events.broken:
            well = reap(spec.name, members, events, stopped=False)
            time.sleep(POLL_S)
        well = well and not members
    finally:
        end_members(spec.name, members, events)
        kill_children()  # what ranks started and left
    return well


def run_set(folder: Path, ranks: range, events: Events, attended: bool) -> int:
    gang_files = [Path(name) for name in json.loads((folder / "gangs.json").read_text())]
    specs = [GangSpec.read(path) for path in gang_files]
    for spec in filter(forks, specs):
        preload(spec)
    order = StopOrder(attended)
    for spec, gang_file in zip(specs, gang_files, strict=True):
        events.emit("gang_started", gang=spec.name)
        if order.given() or not run_gang(spec, gang_file, ranks, events, order):
            return 128 + signal.SIGTERM if order.given() else 1
        events.emit("gang_ended", gang=spec.name)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workloads.node")
    parser.add_argument("set", type=Path, help="folder with gangs.json")
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument(
        "--ranks", required=True, metavar="LO:HI", help="global ranks of this node, HI excluded"
    )
    parser.add_argument("--attended", action="store_true", help="stop at the end of standard input")
    parser.add_argument("--parent", type=int, help="pid whose death ends this node (on the driver's machine)")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(signal.SIGTERM, options.parent)
    adopt_orphans()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s node %(levelname)s %(message)s")
    events = Events(options.node_rank)
    step = (
        f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        if "SLURM_STEP_ID" in os.environ
        else None
    )
    events.emit("node_started", host=socket.gethostname(), pid=os.getpid(), step=step, source=__file__)
    low, high = map(int, options.ranks.split(":"))
    try:
        return run_set(options.set, range(low, high), events, options.attended)
    except Exception as error:
        from workloads.rank import failure_report

        log.exception("node %d failed", options.node_rank)
        events.emit("node_failed", error=failure_report(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
