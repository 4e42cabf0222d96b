"""Plays many small cells in a row: one node parent for all of a layout forks the ranks of every gang of theirs."""

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from orchestrator import provenance
from orchestrator.failure import AttemptError, Failure, first_failure
from orchestrator.judge.policy import judge_attempt
from orchestrator.launch import GangSet, environment, launch_command
from orchestrator.planning import Planned
from orchestrator.publish import publish
from orchestrator.result import unjudged
from orchestrator.staging import SAVED, ArmGangs, arm_gangs, stage
from orchestrator.store import RESULT, Store, write_json

Json = dict[str, Any]
Take = Callable[[Planned, Json], None]
STOP_S = 20.0


@dataclass
class _Played:
    """One cell that is being played. left: gangs that have not ended yet."""

    one: Planned
    attempt: Path
    gangs: ArmGangs
    left: int
    events: list[Mapping[str, Any]]


def play(store: Store, cells: Sequence[Planned], folder: Path, take: Take) -> None:
    """Runs and judges every cell and gives each result to `take` as it comes. A cell whose rank fails has an ERROR and
    does not stop the others. folder: for what the node parents leave."""
    order = sorted(cells, key=lambda one: int(one.root.parallelism.ranks))
    for ranks, group in groupby(order, key=lambda one: int(one.root.parallelism.ranks)):
        _play_layout(store, list(group), folder / f"ranks-{ranks}", take)


def _play_layout(store: Store, cells: Sequence[Planned], folder: Path, take: Take) -> None:
    promised: set[str] = set()
    played: list[_Played] = []
    origin = provenance.collect()
    for one in cells:
        store.write_cell(one.cell)
        attempt = store.new_attempt(one.id)
        write_json(attempt / "provenance.json", origin, durable=False)
        gangs = _without(arm_gangs(stage(one.cell, store, attempt, None), "candidate"), promised)
        promised |= gangs.built.keys() | gangs.served.keys()
        played.append(_Played(one, attempt, gangs, len(gangs.gang_set.gangs), []))
    every = [spec for cell in played for spec in cell.gangs.gang_set.gangs]
    gang_set = replace(played[0].gangs.gang_set, folder=folder, gangs=every)
    waiting = iter(played)
    now = next(waiting)
    try:
        for event in _events(gang_set, float(cells[0].cell["policy"]["step_timeout_s"])):
            now.events.append(event)
            now.left -= event["kind"] == "gang_ended"
            if not now.left:
                take(now.one, _conclude(store, now))
                now = next(waiting, now)
    except AttemptError as error:
        for cell in (now, *waiting):
            take(cell.one, _failed(cell, error.failure))


def _without(gangs: ArmGangs, promised: set[str]) -> ArmGangs:
    """The same without references, and saved states, that a cell before makes."""
    doubled = {str(path) for key, path in gangs.built.items() if key in promised}
    *helping, scenario = gangs.gang_set.gangs
    kept = [
        spec
        for spec in helping
        if spec.output not in doubled and not (spec.name == SAVED and spec.saved_dir in promised)
    ]
    promised |= {spec.saved_dir for spec in kept if spec.name == SAVED}
    kept.append(scenario)
    return replace(
        gangs,
        gang_set=replace(gangs.gang_set, gangs=kept),
        built={key: path for key, path in gangs.built.items() if key not in promised},
        served={key: path for key, path in gangs.served.items() if key not in promised},
    )


def _conclude(store: Store, cell: _Played) -> Json:
    folders = {spec.name: Path(spec.output) for spec in cell.gangs.gang_set.gangs}
    publish(store, cell.gangs)
    error = first_failure(cell.events, folders)
    if error is not None:
        return _failed(cell, error.failure)
    result = judge_attempt(cell.one.cell, cell.attempt, store.reference_dirs(cell.one.cell))
    write_json(cell.attempt / RESULT, result, durable=False)
    return result


def _failed(cell: _Played, failure: Failure) -> Json:
    result = unjudged(cell.one.cell, cell.one.id, cell.attempt.name, "ERROR", failure)
    write_json(cell.attempt / RESULT, result, durable=False)
    return result


def _events(gang_set: GangSet, limit_s: float) -> Iterator[Mapping[str, Any]]:
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
        yield from _lines(process, limit_s)
        if process.wait(STOP_S) != 0:
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


def _lines(process: "subprocess.Popen[bytes]", limit_s: float) -> Iterator[Mapping[str, Any]]:
    assert process.stdout is not None
    pipe, partial = process.stdout.fileno(), b""
    deadline = time.monotonic() + limit_s
    while True:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise AttemptError("hang", f"No gang started or ended for {limit_s:.0f} s.")
        chunk = os.read(pipe, 65536)
        if not chunk:
            return
        deadline = time.monotonic() + limit_s
        *lines, partial = (partial + chunk).split(b"\n")
        yield from map(json.loads, lines)
