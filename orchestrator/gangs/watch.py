"""Follows the launch command of a set of gangs: its events, the signs of its ranks, its end, and who is to blame."""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.failure import AttemptError, first_failure, tail, unkillable
from orchestrator.gangs.hangs import hang
from orchestrator.gangs.launch import GangSet
from orchestrator.gangs.signs import Attention, Limits, Signs, Stall
from workloads.node import STACKS
from workloads.stacks import DUMP_S

# From the order to stop to SIGKILL. A node parent whose ranks can be killed needs less than 4, one whose ranks the
# kernel does not let go less than 13.
STOP_S = 15.0
POLL_S = 0.1
STANDING_S = 5.0  # between reports of where a gang is
NODE_LOG = "node.log"  # of a set

log = logging.getLogger(__name__)

Observer = Callable[[Mapping[str, Any]], None]


class Watch:
    """What is known of a running set: events so far, and where each rank of each gang is."""

    def __init__(self, gang_set: GangSet, limits: Limits, observe: Observer) -> None:
        self.set, self.limits, self.observe = gang_set, limits, observe
        self.log = gang_set.folder / NODE_LOG  # what the launch command wrote
        self.stays = gang_set.stays  # whether the command goes on after all gangs have ended
        self.events: list[Mapping[str, Any]] = []
        self.attention = Attention()
        self.signs: dict[str, Signs] = {}  # of the gangs that have started, in order
        self.last_event = self.attention.now()
        self.stall: Stall | None = None  # of the gang that hangs
        self._partial = b""
        self._reported = 0.0

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Until the command ends, a rank failed, or nothing moves any more."""
        while True:
            ended = process.poll() is not None  # asked first: what it wrote before its end is read below
            self._read(process)
            if ended or any(map(_is_failure, self.events)) or (self.stays and self.have_all_ended()):
                return
            signs = self._current()
            if signs is not None:
                self.stall = signs.stall()
                self._report(signs)
            if self.stall is not None or (signs is None and self._idle() > self.limits.step):
                return

    def have_all_ended(self) -> bool:
        ended = [event for event in self.events if event["kind"] == "gang_ended"]
        return len(ended) == len(self.set.gangs) * self.set.parents

    def _current(self) -> Signs | None:
        """Of the gang that runs; None before and between gangs."""
        latest = next(reversed(self.signs.values()), None)
        return latest if latest is not None and latest.lag() else None

    def _idle(self) -> float:
        return self.attention.now() - self.last_event

    def _report(self, signs: Signs) -> None:
        if self.attention.now() - self._reported < STANDING_S:
            return
        self._reported = self.attention.now()
        standing = signs.standing()
        if standing is not None:
            node = self._node_of(standing["rank"])
            self.observe({**standing, "node": self._hosts()[node] if node is not None else None})

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the command if it still runs: in order within STOP_S, by force after that. Where a gang hangs, its
        stacks are asked for first."""
        assert process.stdin is not None
        seconds = STOP_S
        with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
            if self.stall is not None and not process.stdin.closed:
                suspects = map(str, (*self.stall.lifeless, *self.stall.behind))
                process.stdin.write(" ".join([STACKS.decode(), *suspects]).encode() + b"\n")
                seconds += DUMP_S
            process.stdin.close()
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline:
            self._read(process)
        if process.poll() is None:
            log.warning("pid %d did not stop within %s s and is killed", process.pid, seconds)
            self._kill(process)
        process.wait()
        self._read(process)
        assert process.stdout is not None
        process.stdout.close()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Ranks on this machine die with their parent; those of a step need the scheduler."""
        os.killpg(process.pid, signal.SIGKILL)
        steps = {e["step"] for e in self.events if e["kind"] == "node_started" and e["step"]}
        for step in steps:
            subprocess.run(["scancel", "--signal=KILL", step], check=False, timeout=30)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Events that are waiting, or come within POLL_S; then what the ranks wrote."""
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        timeout = POLL_S
        while select.select([pipe], [], [], timeout)[0]:
            chunk = os.read(pipe, 65536)
            if not chunk:  # all node parents closed their end
                time.sleep(timeout)
                break
            timeout = 0.0
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                self._take(line)
        for name in self.signs:
            self._follow_ranks(name)

    def _follow_ranks(self, gang: str) -> None:
        for record in self.signs[gang].new():
            self.observe(record)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            log.info("node output: %s", line.decode(errors="replace"))  # e.g. of a container's entry point
            return
        self.last_event = self.attention.now()
        self.events.append(event)
        if event["kind"] == "node_started" and not Path(event["source"]).is_relative_to(self.set.tree):
            raise AttemptError(
                "code",
                f"Node {event['node']} runs {event['source']}, which is not of the arm's tree {self.set.tree}: another "
                "installation of this project comes first on the path of its interpreter.",
                node=event["host"],
            )
        if event["kind"] == "gang_started" and event["gang"] not in self.signs:
            spec = next(spec for spec in self.set.gangs if spec.name == event["gang"])
            self.signs[spec.name] = Signs(spec, self.limits, self.attention)
        if event["kind"] == "rank_started":
            self.signs[event["gang"]].started()
        if event["kind"] == "rank_exited":
            self._follow_ranks(event["gang"])  # what it did comes before its end
            self.signs[event["gang"]].ended(event["rank"])
        self.observe(event)

    def judge(self, code: int) -> None:
        """Raises the failure that ended the set, if one did."""
        hosts = self._hosts()
        folders = {spec.name: Path(spec.output) for spec in self.set.gangs}
        error = first_failure(self.events, folders)
        if error is None and self.stall is not None:
            error = hang(self.stall, *self._fates(self.stall.spec.name))
        error = unkillable(self.events) or error
        if error is None and (code != 0 or not self.have_all_ended()):
            error = self._vanished(code, hosts)
        if error is not None:
            if error.failure.rank is not None and error.failure.node is None:
                error.failure.node = self._node_of(error.failure.rank)
            if isinstance(error.failure.node, int):
                error.failure.node = hosts.get(error.failure.node, error.failure.node)
            raise error

    def _hosts(self) -> dict[int, str]:
        return {event["node"]: event["host"] for event in self.events if event["kind"] == "node_started"}

    def _fates(self, gang: str) -> tuple[list[Mapping[str, Any]], dict[int, int]]:
        """The ends of a gang's ranks, and the node of each that started."""
        own = [event for event in self.events if event.get("gang") == gang]
        started = {e["rank"]: e["node"] for e in own if e["kind"] == "rank_started"}
        return [e for e in own if e["kind"] == "rank_exited"], started

    def _node_of(self, rank: int) -> int | None:
        found = (
            e["node"] for e in reversed(self.events) if e["kind"] == "rank_started" and e["rank"] == rank
        )
        return next(found, None)

    def _vanished(self, code: int, hosts: Mapping[int, str]) -> AttemptError:
        """The command ended without the report of a failure: a node is gone, or nothing started at all."""
        how = f"ended with code {code}"
        evidence = tail(self.log)
        if len(hosts) < self.set.parents:
            message = (
                f"{len(hosts)} of {self.set.parents} node parents started, then the launch command {how}."
            )
            return AttemptError("launch_failed", message, log_tail=evidence)
        names = {event["node"] for event in self.events if event["kind"] == "gang_ended"
                 and event["gang"] == self.set.gangs[-1].name}  # fmt: skip
        lost = sorted(set(hosts) - names)
        message = f"The launch command {how} before nodes {lost} had ended their gangs or said why."
        return AttemptError("node_lost", message, node=hosts[lost[0]] if lost else None, log_tail=evidence)


def _is_failure(event: Mapping[str, Any]) -> bool:
    return event["kind"] in ("node_failed", "launch_failed") or (
        event["kind"] == "rank_exited" and event["code"] != 0 and not event["stopped"]
    )
