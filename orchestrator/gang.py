"""Runs one set of gangs to its end: starts the node parents, follows them, leaves no process behind.

A launch is one command whose standard output carries the events of all node parents. What happens to the command
afterwards does not depend on where the nodes are.
"""

import json
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.failure import AttemptError, Position, first_failure, hang, tail
from orchestrator.launch import Allocation, GangSet, environment, launch_command
from workloads.spec import GangSpec

STOP_S = (
    10.0  # from SIGTERM to SIGKILL; a node parent needs less than 4 for the stacks and the end of its ranks
)
POLL_S = 0.1

log = logging.getLogger(__name__)

Observer = Callable[[Mapping[str, Any]], None]


def run(gang_set: GangSet, allocation: Allocation | None, step_timeout_s: float, observe: Observer) -> None:
    """Runs the gangs in order. Returns when all of them ended well, else raises AttemptError.

    observe: gets every event of a node parent and every progress record (with "gang" and "rank"), as they come.
    An exception out of it, or out of a signal handler, ends the gangs as well.
    """
    gang_set.write()
    watch = _Watch(gang_set, observe)
    command = launch_command(gang_set, allocation)
    log.info("starting %s", " ".join(command))
    with (gang_set.folder / "node.log").open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end tells all node parents to stop, also when the driver just dies
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=gang_set.tree,
            env=environment(gang_set, allocation),
            start_new_session=True,  # a Ctrl-C on the terminal reaches the driver only, which stops in order
        )
    try:
        hung = watch.follow(process, step_timeout_s)
    finally:
        watch.stop(process)
    watch.judge(process.returncode, step_timeout_s if hung else None)


class _Watch:
    """What is known of a running set: events so far, and where each rank of each gang is."""

    def __init__(self, gang_set: GangSet, observe: Observer) -> None:
        self.set = gang_set
        self.observe = observe
        self.events: list[Mapping[str, Any]] = []
        self.progress = {spec.name: Progress(spec) for spec in gang_set.gangs}
        self.running: list[str] = []  # gangs that have started, in order
        self.last_sign = time.monotonic()
        self._partial = b""

    def follow(self, process: subprocess.Popen[bytes], timeout_s: float) -> bool:
        """Until the command ends or a rank failed (False), or nothing moved for `timeout_s` (True)."""
        while True:
            ended = process.poll() is not None  # asked first: what it wrote before its end is read below
            self._read(process)
            if ended or any(map(_is_failure, self.events)):
                return False
            if time.monotonic() - self.last_sign > timeout_s:
                return True

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the command if it still runs: in order within STOP_S, by force after that."""
        assert process.stdin is not None
        process.stdin.close()
        deadline = time.monotonic() + STOP_S
        while process.poll() is None and time.monotonic() < deadline:
            self._read(process)
        if process.poll() is None:
            log.warning("pid %d did not stop within %s s and is killed", process.pid, STOP_S)
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
        for name in self.running:
            self._follow_ranks(name)

    def _follow_ranks(self, gang: str) -> None:
        for record in self.progress[gang].new():
            self.last_sign = time.monotonic()
            self.observe(record)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            log.info("node output: %s", line.decode(errors="replace"))  # e.g. of a container's entry point
            return
        self.last_sign = time.monotonic()
        self.events.append(event)
        if event["kind"] == "node_started" and not Path(event["source"]).is_relative_to(self.set.tree):
            raise AttemptError(
                "code",
                f"Node {event['node']} runs {event['source']}, which is not of the arm's tree {self.set.tree}: another "
                "installation of this project comes first on the path of its interpreter.",
                node=event["host"],
            )
        if event["kind"] == "gang_started" and event["gang"] not in self.running:
            self.running.append(event["gang"])
        if event["kind"] == "rank_exited":
            self._follow_ranks(event["gang"])  # what it did comes before its end
        self.observe(event)

    def judge(self, code: int, hung_s: float | None) -> None:
        """Raises the failure that ended the set, if one did. hung_s: after so long without progress."""
        hosts = {event["node"]: event["host"] for event in self.events if event["kind"] == "node_started"}
        folders = {spec.name: Path(spec.output) for spec in self.set.gangs}
        error = first_failure(self.events, folders)
        if error is None and hung_s and self.running:
            gang = self.running[-1]
            exits = [e for e in self.events if e["kind"] == "rank_exited" and e["gang"] == gang]
            error = hang(gang, folders[gang], self.progress[gang].positions, exits, hung_s)
        ended = [event for event in self.events if event["kind"] == "gang_ended"]
        if error is None and (code != 0 or len(ended) != len(self.set.gangs) * self.set.parents):
            error = self._vanished(code, hosts)
        if error is not None:
            if error.failure.rank is not None and error.failure.node is None:
                error.failure.node = self._node_of(error.failure.rank)
            if isinstance(error.failure.node, int):
                error.failure.node = hosts.get(error.failure.node, error.failure.node)
            raise error

    def _node_of(self, rank: int) -> int | None:
        found = (
            e["node"] for e in reversed(self.events) if e["kind"] == "rank_started" and e["rank"] == rank
        )
        return next(found, None)

    def _vanished(self, code: int, hosts: Mapping[int, str]) -> AttemptError:
        """The command ended without the report of a failure: a node is gone, or nothing started at all."""
        how = f"ended with code {code}"
        evidence = tail(self.set.folder / "node.log")
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


class Progress:
    """Follows the progress files of one gang."""

    def __init__(self, spec: GangSpec) -> None:
        self.spec = spec
        self.positions: dict[int, Position] = dict.fromkeys(range(spec.parallelism.ranks), (-1, "end"))
        self._read = dict.fromkeys(self.positions, 0)

    def new(self) -> Sequence[Mapping[str, Any]]:
        """`step` records written since the last call, with "gang" and "rank"; a line in the making waits."""
        records = []
        for rank in self.positions:
            for line in self._lines(rank):
                record = json.loads(line)
                if record["kind"] == "step":
                    self.positions[rank] = (record["index"], record["state"])
                    records.append({**record, "gang": self.spec.name, "rank": rank})
        return sorted(records, key=lambda record: float(record["time"]))

    def _lines(self, rank: int) -> Sequence[bytes]:
        path = Path(self.spec.output) / f"progress-{rank:05d}.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[rank])
            whole = file.read().rpartition(b"\n")[0]
        self._read[rank] += len(whole) + 1 if whole else 0
        return whole.splitlines()
