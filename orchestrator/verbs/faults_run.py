"""Plays many small cells: in each of some lanes one node parent forks the ranks of one gang after the other."""

import json
import os
import queue
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import provenance
from orchestrator.failure import AttemptError, Failure, first_failure
from orchestrator.gangs.launch import GangSet, environment, free_port, launch_command
from orchestrator.judge.policy import judge_attempt
from orchestrator.publish import publish
from orchestrator.result import unjudged
from orchestrator.staging import SAVED, ArmGangs, arm_gangs, stage
from orchestrator.store import RESULT, Store, write_json
from orchestrator.verbs.faults_matrix import Play
from workloads.spec import GangSpec

Json = dict[str, Any]
Take = Callable[[Play, Json], None]
STOP_S = 20.0
LOOK_S = 0.5  # between looks whether to stop


@dataclass
class _Played:
    """One cell that is being played. left: gangs that have not ended yet."""

    play: Play
    attempt: Path
    gangs: ArmGangs
    left: int
    events: list[Mapping[str, Any]]


def lanes() -> int:
    """How many gangs run at once: one for each core that this process may use."""
    return len(os.sched_getaffinity(0))


def play(store: Store, cells: Sequence[Play], folder: Path, take: Take) -> None:
    """Runs and judges every cell and gives each result to `take` as it comes, never two at once. A cell whose rank
    fails has an ERROR and does not stop the others. folder: for what the node parents leave."""
    stop, lock = threading.Event(), threading.Lock()
    left: queue.SimpleQueue[tuple[int, list[Play]]] = queue.SimpleQueue()
    for chunk in enumerate(_chunks(cells)):
        left.put(chunk)

    def alone(one: Play, result: Json) -> None:
        with lock:
            take(one, result)

    def lane(number: int) -> None:
        while not stop.is_set():
            try:
                chunk, own = left.get_nowait()
            except queue.Empty:
                return
            Lane(store, folder / f"chunk-{chunk:02d}", number, stop).play(own, alone)

    with ThreadPoolExecutor(lanes()) as pool:
        try:
            for ended in [pool.submit(lane, number) for number in range(lanes())]:
                ended.result()
        finally:
            stop.set()  # whatever ends this ends the other lanes too


def _chunks(cells: Sequence[Play]) -> list[list[Play]]:
    """What shares fresh references and can share a node parent: cells of one model on one number of ranks. The largest
    come first, so that no lane is left with one."""
    found: dict[tuple[str, int], list[Play]] = {}
    for one in cells:
        found.setdefault((one.cell.place.model, _ranks(one)), []).append(one)
    return sorted(found.values(), key=lambda chunk: -len(chunk) * _ranks(chunk[0]))


def _ranks(one: Play) -> int:
    return int(one.planned.root.parallelism.ranks)


@dataclass(frozen=True)
class Lane:
    """Plays cells of one chunk in order. number: of the lane, whose ports are its own."""

    store: Store
    folder: Path
    number: int
    stop: threading.Event

    def play(self, cells: Sequence[Play], take: Take) -> None:
        """A cell in which the node parent dies or falls silent has an ERROR; those after it get another parent."""
        left = self._staged(cells)
        for turn in range(len(left)):
            if not left or self.stop.is_set():
                return
            left = self._with_one_parent(left, self.folder / str(turn), take)

    def _staged(self, cells: Sequence[Play]) -> list[_Played]:
        promised: set[str] = set()
        played: list[_Played] = []
        origin = provenance.collect()
        for one in cells:
            self.store.write_cell(one.planned.cell)
            attempt = self.store.new_attempt(one.planned.id)
            write_json(attempt / "provenance.json", origin, durable=False)
            gangs = self._gangs(one, attempt, promised)
            played.append(_Played(one, attempt, gangs, len(gangs.gang_set.gangs), []))
        return played

    def _gangs(self, one: Play, attempt: Path, promised: set[str]) -> ArmGangs:
        """The scenario of the cell, after the fresh starts and saved states that are nowhere and that no cell before
        makes. promised: their keys and folders, with which those of this cell join them."""
        staged = stage(one.planned.cell, self.store, attempt, None)
        own = arm_gangs(staged, "candidate")
        told = arm_gangs(replace(staged, cell=one.reference.cell), "candidate")
        *helping, clean = told.gang_set.gangs
        doubled = {str(path) for key, path in told.built.items() if key in promised}
        kept = [
            spec
            for spec in helping
            if spec.output not in doubled and not (spec.name == SAVED and spec.saved_dir in promised)
        ]
        promised |= told.built.keys() | {spec.saved_dir for spec in kept if spec.name == SAVED}
        gangs = [*kept, replace(own.gang_set.gangs[-1], saved_dir=clean.saved_dir)]
        return replace(
            told,
            gang_set=replace(own.gang_set, gangs=[self._with_port(spec) for spec in gangs]),
            built={key: path for key, path in told.built.items() if str(path) not in doubled},
        )

    def _with_port(self, spec: GangSpec) -> GangSpec:
        """Gangs of other lanes run at the same time, and ports are chosen long before they are used."""
        return replace(
            spec, master_port=next(port for port in iter(free_port, 0) if port % lanes() == self.number)
        )

    def _with_one_parent(self, cells: Sequence[_Played], folder: Path, take: Take) -> list[_Played]:
        """Returns the cells that were not begun when the node parent ended early."""
        every = [spec for cell in cells for spec in cell.gangs.gang_set.gangs]
        gang_set = replace(cells[0].gangs.gang_set, folder=folder, gangs=every)
        waiting = list(cells)
        try:
            for event in self._events(
                gang_set, float(cells[0].play.planned.cell["policy"]["step_timeout_s"])
            ):
                now = waiting[0]
                now.events.append(event)
                now.left -= event["kind"] == "gang_ended"
                if not now.left:
                    take(now.play, self._conclude(waiting.pop(0)))
        except AttemptError as error:
            for now in waiting[:1]:
                take(now.play, _failed(now, error.failure))
            waiting = waiting[1:]
        return [] if self.stop.is_set() else waiting

    def _conclude(self, cell: _Played) -> Json:
        folders = {spec.name: Path(spec.output) for spec in cell.gangs.gang_set.gangs}
        known = {key for key in cell.gangs.served if self.store.holds(key)}
        served = {key: path for key, path in cell.gangs.served.items() if key not in known}
        publish(self.store, replace(cell.gangs, served=served))
        error = first_failure(cell.events, folders)
        if error is not None:
            return _failed(cell, error.failure)
        result = judged(self.store, cell.play, cell.attempt)
        write_json(cell.attempt / RESULT, result, durable=False)
        return result

    def _events(self, gang_set: GangSet, limit_s: float) -> Iterator[Mapping[str, Any]]:
        """Events of the node parent as they come. Raises AttemptError when it dies, or says nothing for too long."""
        gang_set.write()
        with (gang_set.folder / "node.log").open("ab") as errors:
            process = subprocess.Popen(
                [*launch_command(gang_set, None), "--keep-going"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=gang_set.tree,
                env=environment(gang_set, None),
                start_new_session=True,
            )
        try:
            yield from self._lines(process, limit_s)
            if not self.stop.is_set() and process.wait(STOP_S) != 0:
                raise AttemptError(
                    "node_lost", f"The node parent ended with code {process.returncode}; see node.log."
                )
        finally:
            assert process.stdin is not None
            process.stdin.close()  # the order to stop
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _lines(self, process: "subprocess.Popen[bytes]", limit_s: float) -> Iterator[Mapping[str, Any]]:
        assert process.stdout is not None
        pipe, partial = process.stdout.fileno(), b""
        deadline = time.monotonic() + limit_s
        while not self.stop.is_set():
            if not select.select([pipe], [], [], LOOK_S)[0]:
                if time.monotonic() > deadline:
                    raise AttemptError("hang", f"No gang started or ended for {limit_s:.0f} s.")
                continue
            chunk = os.read(pipe, 65536)
            if not chunk:
                return
            deadline = time.monotonic() + limit_s
            *lines, partial = (partial + chunk).split(b"\n")
            yield from map(json.loads, lines)


def judged(store: Store, one: Play, attempt: Path) -> Json:
    """What the records of an attempt say by the rules of today."""
    return judge_attempt(one.planned.cell, attempt, store.reference_dirs(one.reference.cell))


def _failed(cell: _Played, failure: Failure) -> Json:
    result = unjudged(cell.play.planned.cell, cell.play.planned.id, cell.attempt.name, "ERROR", failure)
    write_json(cell.attempt / RESULT, result, durable=False)
    return result
