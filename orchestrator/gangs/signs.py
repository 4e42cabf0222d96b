"""Follows what the ranks of a gang show of themselves: their steps, their units of work and their beats.

Everything is a change that this process has seen, timed by its own clock: it works where files appear late and where
the clocks of nodes differ. A rank is silent from the last change of its step or of its units of work on; it is lifeless
from its last beat on (`workloads.heartbeat`).
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads import heartbeat
from workloads.spec import GangSpec

Position = tuple[int, str]  # step index, and "start" or "end", of a rank's last record
NOT_BEGUN: Position = (-1, "end")
LOOK_S = 1.0  # between looks at the heartbeats
ABSENCE_S = 5.0  # a longer time between two looks was spent elsewhere
STANDING = "standing.json"  # of an attempt: the last record of kind "standing"
LIFELESS_S = 4 * heartbeat.BEAT_S  # without a beat, however short the limit
SILENT_S = 5 * heartbeat.BEAT_S  # the shortest limit, so that it is known by then who is lifeless


class Attention:
    """The seconds in which this process was looking. While it is suspended with its job, or waits for a file system,
    nobody's silence can be seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds = 0.0

    def now(self) -> float:
        moment = self._clock()
        self._seconds += min(moment - self._last, ABSENCE_S)
        self._last = moment
        return self._seconds


@dataclass(frozen=True)
class Limits:
    """Seconds for which a rank may be silent, at least SILENT_S. of_steps: by what the step does, where it is not
    `step`."""

    step: float
    of_steps: Mapping[str, float] = field(default_factory=dict)

    @property
    def longest(self) -> float:
        return max([self.step, *self.of_steps.values()])

    def of(self, spec: GangSpec, position: Position) -> float:
        """A rank that has not begun is on its way into the first step."""
        step = spec.steps[max(position[0], 0)] if spec.steps else None
        limit = self.step if step is None else self.of_steps.get(step.do, self.step)
        return max(limit, SILENT_S)


def slowest_rank(standing: Mapping[str, Any]) -> str:
    """Of a "standing" record, for people."""
    where = f"on {standing['node']}" if standing["node"] is not None else "not started"
    return f"rank {standing['rank']} {where}, silent for {standing['silent_s']:.0f} s"


def limits_of(policy: Mapping[str, Any]) -> Limits:
    """Of a cell."""
    given = policy.get("step_timeouts_s", {})  # cells from before there were any have none
    return Limits(float(policy["step_timeout_s"]), {do: float(s) for do, s in given.items() if s is not None})


@dataclass
class RankSigns:
    """moved: when its step or units changed. beats: when each process that beats for it last did, of those seen."""

    moved: float
    position: Position = NOT_BEGUN
    beats: dict[str, float] = field(default_factory=dict)
    read: dict[str, tuple[int, int]] = field(default_factory=dict)  # each heartbeat file as last seen
    has_ended: bool = False

    @property
    def beat(self) -> float | None:
        """Of the process that has been still for longest."""
        return min(self.beats.values(), default=None)

    def hear(self, process: str, read: tuple[int, int] | None, now: float) -> None:
        before = self.read.get(process)
        if read is None or read == before:
            return
        if before is None or read[1] != before[1]:
            self.moved = now
        self.beats[process], self.read[process] = now, read


@dataclass(frozen=True)
class Stall:
    """A gang at the moment when it was found hung. silent_s: of the rank for which nothing was seen longest.
    lifeless: ranks that had stopped to beat about when the others stopped to work, or before."""

    spec: GangSpec
    positions: Mapping[int, Position]
    silent_s: float
    lifeless: Sequence[int]

    @property
    def behind(self) -> list[int]:
        """Ranks that others are ahead of."""
        furthest = max(map(order, self.positions.values()))
        return [rank for rank, position in self.positions.items() if order(position) < furthest]


class Signs:
    """Of all ranks of one gang."""

    def __init__(self, spec: GangSpec, limits: Limits, attention: Attention) -> None:
        self.spec, self.limits, self._attention = spec, limits, attention
        now = attention.now()
        self.ranks = {rank: RankSigns(now) for rank in range(spec.parallelism.ranks)}
        self._offsets = dict.fromkeys(self.ranks, 0)
        self._looked = now

    def new(self) -> Sequence[Mapping[str, Any]]:
        """`step` records written since the last call, with "gang" and "rank"; a line in the making waits."""
        now, records = self._attention.now(), []
        for rank, signs in self.ranks.items():
            for line in self._lines(rank):
                record = json.loads(line)
                if record["kind"] == "step":
                    signs.position, signs.moved = (record["index"], record["state"]), now
                    records.append({**record, "gang": self.spec.name, "rank": rank})
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._feel(now)
        return sorted(records, key=lambda record: float(record["time"]))

    def started(self) -> None:
        """Some process of the gang has just come up, so that it is still beginning."""
        now = self._attention.now()
        for signs in self.ranks.values():
            if signs.position == NOT_BEGUN:
                signs.moved = now

    def ended(self, leader: int) -> None:
        """The process that leads these ranks has come to an end."""
        for rank in self._led(leader):
            self.ranks[rank].has_ended = True

    def stall(self) -> Stall | None:
        """When nobody works among the ranks that are furthest behind, for which the others wait, or when one rank is
        lifeless, for longer than its limit."""
        lag = self.lag()
        if not self.lifeless(1) and not (lag and all(self.silence(rank) > self._limit(rank) for rank in lag)):
            return None
        positions = {rank: signs.position for rank, signs in self.ranks.items()}
        lifeless = self.lifeless(0.5)
        return Stall(self.spec, positions, max(map(self.silence, lifeless or lag)), lifeless)

    def lag(self) -> list[int]:
        """Ranks that run and are furthest behind in their steps; empty when none runs."""
        places = {rank: order(s.position) for rank, s in self.ranks.items() if not s.has_ended}
        last = min(places.values(), default=None)
        return [rank for rank, place in places.items() if place == last]

    def lifeless(self, share: float) -> list[int]:
        """Ranks that beat before and did not for longer than this share of their limit."""
        now = self._attention.now()
        return [
            rank
            for rank, signs in self.ranks.items()
            if signs.beat is not None
            and not signs.has_ended
            and now - signs.beat > max(share * self._limit(rank), LIFELESS_S)
        ]

    def silence(self, rank: int) -> float:
        return self._attention.now() - self.ranks[rank].moved

    def standing(self) -> Mapping[str, Any] | None:
        """Where the gang is, by its slowest rank; None when no rank runs."""
        lag = self.lag()
        if not lag:
            return None
        lifeless = self.lifeless(0)  # others may have come to wait for them before they fell silent
        slowest = max(lag, key=lambda rank: (rank in lifeless, self.silence(rank)))
        index = max(self.ranks[slowest].position[0], 0)
        step = self.spec.steps[index]
        return {
            "kind": "standing",
            "gang": self.spec.name,
            "index": index,
            "step": f"{index + 1}/{len(self.spec.steps)} {step.do} {step.name or step.checkpoint}",
            "rank": slowest,
            "silent_s": round(self.silence(slowest), 1),
            "ranks_there": len(lag),
        }

    def _limit(self, rank: int) -> float:
        return self.limits.of(self.spec, self.ranks[rank].position)

    def _led(self, leader: int) -> range:
        return range(leader, leader + self.spec.ranks_per_member)

    def _feel(self, now: float) -> None:
        """One look at all heartbeats. A process beats for all ranks that it leads, and a worker that it has started
        for its own one."""
        folder = Path(self.spec.output)
        for leader in list(self.ranks)[:: self.spec.ranks_per_member]:
            read = heartbeat.read(heartbeat.beat_file(folder, leader))
            for rank in self._led(leader):
                self.ranks[rank].hear("leader", read, now)
                if self.spec.ranks_per_member > 1:
                    self._feel_worker(folder, rank, now)

    def _feel_worker(self, folder: Path, rank: int, now: float) -> None:
        signs, worker = self.ranks[rank], heartbeat.find_worker(folder, rank)
        if signs.position == (len(self.spec.steps) - 1, "end"):
            signs.beats.pop("worker", None)  # its leader ends it
        elif worker is not None:
            signs.hear("worker", heartbeat.read(worker[0]), now)

    def _lines(self, rank: int) -> Sequence[bytes]:
        path = Path(self.spec.output) / f"progress-{rank:05d}.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets[rank])
            whole = file.read().rpartition(b"\n")[0]
        self._offsets[rank] += len(whole) + 1 if whole else 0
        return whole.splitlines()


def order(position: Position) -> tuple[int, bool]:
    return position[0], position[1] == "end"
