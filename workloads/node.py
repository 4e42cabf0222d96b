"""Parent of the ranks of one node: imports torch once, runs the gangs of a set in order, reports every exit.

`python -m workloads.node SET --node-rank I --ranks LO:HI` reads `SET/gangs.json`, a list of gang files, and
writes one JSON event per line to standard output, where the driver (or a person) listens. With `--attended` the
end of standard input is the order to stop, given by the driver or by its death; SIGTERM is the same order. Then,
and when a rank fails, the stacks of the ranks go into their logs before they are ended. A line `stacks 6 9` before that
order asks for the stacks of all ranks from outside, for a rank that hangs may be unable to tell its own; those of ranks
6 and 9 first.
"""

import argparse
import gc
import json
import logging
import os
import select
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import FrameType

from workloads import shared_memory, stacks
from workloads.member import KILL_S, POLL_S, Events, Member, end_members, forks, reap, start_rank
from workloads.processes import adopt_orphans, die_with_parent, family, kill_children
from workloads.spec import GangSpec

STACKS = b"stacks"  # on standard input, with ranks
RUN = b"run"  # on that of a node that waits for gangs, with the folder of their set

log = logging.getLogger(__name__)


class StopOrder:
    """Whether the gangs are to stop. Not an exception: the order may come while ranks are being ended.

    attended: a listener holds the other end of standard input, and its end is an order too. Slurm's own signals
    are no way to give one: they reach the ranks as well, which die before their stacks are known.
    """

    def __init__(self, attended: bool) -> None:
        self._attended = attended
        self._signalled = False
        self._said = b""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def given(self) -> bool:
        while self._attended and not self._signalled and select.select([0], [], [], 0)[0]:
            said = os.read(0, 4096)
            self._said += said
            self._signalled = not said
        return self._signalled

    def lagging(self) -> list[int] | None:
        """Ranks to look at first, where the order came with a request for stacks."""
        command, *ranks = self._said.split() or [b""]
        return list(map(int, ranks)) if command == STACKS else None


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


def run_gang(spec: GangSpec, gang_file: Path, ranks: range, events: Events, order: StopOrder) -> bool:
    """Runs this node's members to their end. False when one failed, a stop was ordered or the driver is gone."""
    members: dict[int, Member] = {}
    well, ordered = True, False
    try:
        for rank in (rank for rank in ranks if rank % spec.ranks_per_member == 0):
            members[rank] = start_rank(spec, gang_file, rank, events)
        while members and well and not (ordered := order.given()) and not events.broken:
            well = reap(spec.name, members, events, stopped=order.given)
            time.sleep(POLL_S)
        well = well and not members
    finally:
        lagging = order.lagging() if ordered else None
        if lagging is not None:
            stacks.dump({rank: one.pid for rank, one in members.items()}, Path(spec.output), lagging)
        shared = shared_memory.used_by(family(os.getpid())[1:])
        end_members(spec.name, members, events, ordered)
        kill_children(KILL_S)  # what ranks started and left
        shared_memory.remove_left(shared)
    return well


def run_set(folder: Path, ranks: range, events: Events, attended: bool, keep_going: bool) -> int:
    gang_files = [Path(name) for name in json.loads((folder / "gangs.json").read_text())]
    specs = [GangSpec.read(path) for path in gang_files]
    for spec in {(s.backend.engine, s.trace): s for s in specs if forks(s)}.values():
        preload(spec)
    order = StopOrder(attended)
    for spec, gang_file in zip(specs, gang_files, strict=True):
        events.emit("gang_started", gang=spec.name)
        well = not order.given() and run_gang(spec, gang_file, ranks, events, order)
        if order.given() or not (well or keep_going):
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
    parser.add_argument(
        "--keep-going", action="store_true", help="a gang that fails does not stop those after it"
    )
    parser.add_argument("--parent", type=int, help="pid whose death ends this node (on the driver's machine)")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(signal.SIGTERM, options.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s node %(levelname)s %(message)s")
    events = Events(options.node_rank)
    return be_node(options.set, options.ranks, events, options.attended, options.keep_going)


def be_node(folder: Path, ranks: str, events: Events, attended: bool, keep_going: bool = False) -> int:
    """Of this process, from now on; its exit code. ranks: LO:HI."""
    adopt_orphans()
    events.node_started(__file__)
    low, high = map(int, ranks.split(":"))
    try:
        return run_set(folder, range(low, high), events, attended, keep_going)
    except Exception as error:
        from workloads.rank import failure_report

        log.exception("the node of ranks %s failed", ranks)
        events.emit("node_failed", error=failure_report(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
