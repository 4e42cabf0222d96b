"""The check of one node: `python -m workloads.preflight FOLDER --node-rank I --ranks LO:HI --nodes N --meet HOST:PORT`.

Writes events like a node parent to standard output, so that they arrive where no file does. What it finds are events
`node_check` with a `stage`, in this order: machine, gpus, meet, versions, files, pair (one for each partner), whole,
rounds (all since `meet`), leave, done. Each has `found`, or `error` where finding out failed; a node that does not
come to `done` has died.

With `--stay` the check is made in a child, and the process, which has imported torch by then, waits for a line
`run SET` on standard input: then it is the node parent of that set of gangs, as `python -m workloads.node SET` is.
"""

import argparse
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.member import Events
from workloads.node import RUN, be_node
from workloads.preflight import files, gpus
from workloads.processes import die_with_parent
from workloads.source import ENGINE_PACKAGES, files_hash, files_in, package_versions

if TYPE_CHECKING:
    from workloads.preflight import network

GANG = "preflight"
WAIT_S = 0.05  # between looks at the child
LOST_PARTNERS = (
    2  # a node that as many others do not reach is itself the cause: it stops before it holds up all
)

log = logging.getLogger(__name__)


class Report:
    def __init__(self, events: Events) -> None:
        self._events = events

    def stage(self, name: str, find: Callable[[], Any], **about: Any) -> tuple[Any, bool]:
        """What was found, and whether finding out did not fail. Either is told to the driver."""
        found, error = None, None
        try:
            found = find()
        except Exception as failure:
            log.exception("stage %s", name)
            error = f"{type(failure).__name__}: {failure}"
        self._events.emit("node_check", stage=name, found=found, error=error, **about)
        return found, error is None


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """slurm_node: the name that Slurm has for this node. sources: the trees that arms run, by path."""
    return {
        "host": socket.gethostname(),
        "slurm_node": os.environ.get("SLURMD_NODENAME"),
        "ranks": options.ranks,
        "cpus": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "packages": package_versions(ENGINE_PACKAGES),
        "sources": {str(tree): files_hash(files_in(tree)) for tree in options.source},
    }


def check(options: argparse.Namespace, report: Report) -> None:
    report.stage("machine", lambda: machine(options))
    if options.device == "cuda":
        report.stage("gpus", gpus.look)
    if options.nodes > 1 and options.network:
        _with_others(options, report)


def _with_others(options: argparse.Namespace, report: Report) -> None:
    from workloads.preflight import network  # torch, which takes seconds

    network.prepare()
    opened: list[network.Meeting] = []

    def meet() -> list[int]:
        opened.append(network.Meeting(options.node_rank, options.nodes, options.meet, options.limit))
        return opened[0].arrive("start", options.limit)

    _, met = report.stage("meet", meet)
    if not met:
        return
    if not opened[0].absent:
        report.stage("rounds", partial(_look_around, options, report, opened[0]))
    report.stage("leave", opened[0].leave)


def _look_around(options: argparse.Namespace, report: Report, meeting: "network.Meeting") -> None:
    """Ends early where a node has died: it is known by that."""
    from workloads.preflight import network

    node, nodes = options.node_rank, options.nodes
    report.stage("versions", network.versions)
    report.stage("files", lambda: files.exchange(options.folder, node, nodes, options.grace))
    limit, lost = (
        options.grace + 3 * network.LINK_S,
        0,
    )  # of a round, in which a pair connects and then measures
    for turn, other in enumerate(network.partners(node, nodes)):
        if meeting.arrive(f"round {turn}", limit):
            return
        if other is None or lost == LOST_PARTNERS or meeting.gave_up(other):
            continue
        lost += not report.stage("pair", partial(network.pair, meeting, other, options.device), peer=other)[1]
        if lost == LOST_PARTNERS:
            meeting.give_up()
    if lost:
        meeting.store.set("unreachable", "")
    if not meeting.arrive("whole", limit) and not meeting.store.check(["unreachable"]):
        report.stage("whole", lambda: network.whole(meeting, options.device))


def _end_with_driver() -> None:
    """The end of standard input is the order to stop, given by the driver or by its death."""
    while os.read(0, 4096):
        pass
    os._exit(128 + signal.SIGTERM)


def _in_a_child(options: argparse.Namespace, events: Events) -> int:
    """Pid of the process that makes the check. What collectives leave, threads and a CUDA context, ends with it."""
    import torch  # noqa: F401 - before the fork: the child needs it, and so do the gangs

    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(signal.SIGKILL, parent)
        _check(options, events)
        os._exit(0)  # a group that broke may not let itself be taken apart
    return child


def _stay(options: argparse.Namespace, events: Events) -> int:
    """Exit code of this node, which ends with standard input. A check that died has not told `done`."""
    child: int | None = _in_a_child(options, events)
    said = b""
    while not said.endswith(b"\n"):
        if child is not None and os.waitpid(child, os.WNOHANG)[0]:
            child = None
            events.emit("gang_ended", gang=GANG)
        if select.select([0], [], [], WAIT_S if child is not None else None)[0]:
            data = os.read(0, 4096)
            said += data
            if not data:
                return 128 + signal.SIGTERM
    code = _go_on(Path(os.fsdecode(said.removeprefix(RUN).strip())), options, events)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while code == 0 and os.read(
        0, 4096
    ):  # a step of this kind ends all nodes a while after the first that is gone
        pass
    return code


def _go_on(folder: Path, options: argparse.Namespace, events: Events) -> int:
    """As the node parent of a set of gangs, whose folder gets the log."""
    with (folder / f"node-{options.node_rank}.log").open("ab") as errors:
        sys.stderr.flush()
        os.dup2(errors.fileno(), 2)
        os.dup2(errors.fileno(), 1)  # events have a descriptor of their own
    return be_node(folder, options.ranks, events, attended=True)


def _check(options: argparse.Namespace, events: Events) -> None:
    began, report = time.monotonic(), Report(events)
    check(options, report)
    report.stage("done", lambda: {"seconds": time.monotonic() - began})
    sys.stderr.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workloads.preflight")
    parser.add_argument("folder", type=Path, help="on the shared file system, for a file of each node")
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument(
        "--ranks", required=True, metavar="LO:HI", help="global ranks that this node will run"
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where node 0 listens; needed for several nodes")
    parser.add_argument(
        "--limit", type=float, default=60, help="seconds until a node that has not come is absent"
    )
    parser.add_argument(
        "--grace", type=float, default=60, help="seconds until a file must be visible elsewhere"
    )
    parser.add_argument("--source", type=Path, action="append", default=[], help="a tree whose hash is told")
    parser.add_argument("--no-network", action="store_false", dest="network", help="meet no other node")
    parser.add_argument("--attended", action="store_true", help="stop at the end of standard input")
    parser.add_argument(
        "--stay", action="store_true", help="run the gangs that standard input names, after it"
    )
    parser.add_argument("--parent", type=int, help="pid whose death ends this node (on the driver's machine)")
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.parent is not None:
        die_with_parent(signal.SIGTERM, options.parent)
    form = f"%(asctime)s node {options.node_rank} %(levelname)s %(message)s"  # all nodes share one log
    logging.basicConfig(level=logging.INFO, format=form)
    if options.attended and not options.stay:
        threading.Thread(target=_end_with_driver, daemon=True).start()
    events = Events(options.node_rank)
    events.node_started(__file__)
    events.emit("gang_started", gang=GANG)
    if options.stay:
        sys.exit(_stay(options, events))
    _check(options, events)
    events.emit("gang_ended", gang=GANG)
    os._exit(0)  # a group that broke may not let itself be taken apart


if __name__ == "__main__":
    main()
