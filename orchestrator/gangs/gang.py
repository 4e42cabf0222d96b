"""Runs one set of gangs to its end: starts the node parents, follows them, leaves no process behind.

A launch is one command whose standard output carries the events of all node parents. What happens to the command
afterwards does not depend on where the nodes are.
"""

import contextlib
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.failure import AttemptError
from orchestrator.gangs.launch import Allocation, GangSet, environment, launch_command
from orchestrator.gangs.signs import Limits
from orchestrator.gangs.watch import NODE_LOG, STOP_S, Observer, Watch
from workloads.node import RUN

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Waiting:
    """Node parents that have run a set of gangs and wait for another one, with all that they have imported. variables:
    of their environment."""

    process: subprocess.Popen[bytes]
    set: GangSet
    variables: Mapping[str, str]

    def fits(self, gang_set: GangSet, allocation: Allocation | None) -> bool:
        """Whether they are what a launch of this set would start."""
        started = (
            self.set.tree,
            self.set.parents,
            self.set.python,
            self.set.image,
            self.set.ray,
            self.variables,
        )
        own = (gang_set.tree, gang_set.parents, gang_set.python, gang_set.image, gang_set.ray)
        return started == (*own, environment(gang_set, allocation))

    def go_on(self, gang_set: GangSet) -> subprocess.Popen[bytes]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # they have ended meanwhile, as whoever follows them sees
            self.process.stdin.write(RUN + b" " + os.fsencode(gang_set.folder) + b"\n")
            self.process.stdin.flush()
        return self.process

    def close(self) -> None:
        """They are not wanted any more, or have ended."""
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            Watch(self.set, Limits(STOP_S), lambda event: None).stop(self.process)


def run(
    gang_set: GangSet,
    allocation: Allocation | None,
    limits: Limits | float,
    observe: Observer,
    waiting: Waiting | None = None,
) -> Waiting | None:
    """Runs the gangs in order. Returns when all of them ended well, else raises AttemptError. waiting: node parents
    that are there already, where they fit. Returns those of a set that stays.

    limits: how long a rank may be silent; a number holds for every step. observe: gets every event of a node parent and
    every progress record (with "gang" and "rank") as they come, and records of kind "standing": where the gang is, by
    its slowest rank, {"gang", "index" and "step", "rank", "node" (its host), "silent_s", "ranks_there"}. An exception
    out of it, or out of a signal handler, ends the gangs as well.
    """
    gang_set.write()
    watch = Watch(gang_set, limits if isinstance(limits, Limits) else Limits(limits), observe)
    if waiting is not None and waiting.fits(gang_set, allocation):
        process, variables = waiting.go_on(gang_set), waiting.variables
        watch.log, watch.stays = waiting.set.folder / NODE_LOG, True
    else:
        if waiting is not None:
            waiting.close()
        variables = environment(gang_set, allocation)
        process = _launch(gang_set, launch_command(gang_set, allocation), variables)
    try:
        watch.follow(process)
    except BaseException:
        try:
            watch.stop(process)
        finally:  # also where the observer fails again, or a second order comes
            if process.poll() is None:
                watch.observe = lambda record: None
                watch.stop(process)
        raise
    if gang_set.stays and watch.have_all_ended() and process.poll() is None:
        return Waiting(process, gang_set, variables)
    order = _stop(watch, process)
    watch.judge(process.returncode)
    if order is not None:
        raise order
    return None


def _launch(
    gang_set: GangSet, command: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    log.info("starting %s", " ".join(command))
    with (gang_set.folder / NODE_LOG).open("ab") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end tells all node parents to stop, also when the driver just dies
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=gang_set.tree,
            env=variables,
            start_new_session=True,  # a Ctrl-C on the terminal reaches the driver only, which stops in order
        )


def _stop(watch: Watch, process: subprocess.Popen[bytes]) -> AttemptError | None:
    """The order to end that came meanwhile, such as Slurm's after it has lost a node: why the gangs had ended before it
    is what a reader must know."""
    try:
        watch.stop(process)
    except AttemptError as order:
        watch.stop(process)
        return order
    return None
