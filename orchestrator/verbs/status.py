"""What the cells of the runs in a store are doing: from their files, and one look at Slurm for all of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from orchestrator.cluster import slurm
from orchestrator.cluster.history import INDEX, read_index
from orchestrator.cluster.jobs import Book, Task
from orchestrator.gangs.signs import STANDING, slowest_rank
from orchestrator.show import SHORT, table
from orchestrator.store import Store, StoreError, attempt_number, read_json
from orchestrator.verbs.selection import varied_labels

Json = dict[str, Any]


@dataclass(frozen=True)
class CellState:
    """The latest attempt at a cell. result: None while there is none. task: of an attempt that was handed to Slurm.
    job: what Slurm knows of it."""

    attempt: Path | None
    result: Json | None
    task: Task | None
    job: slurm.JobState | None


@dataclass(frozen=True)
class States:
    """Of many cells at one moment. trouble: why Slurm could not be asked, else ""."""

    cells: dict[str, CellState]
    trouble: str


def states(store: Store, names: Sequence[str]) -> States:
    """Of cells by id. At most one call of squeue and one of sacct, and none where every cell has a result."""
    book, found = Book(store), dict[str, CellState]()
    for name in dict.fromkeys(names):
        attempts = store.attempts(name)
        attempt = attempts[-1] if attempts else None
        result = store.result(attempt) if attempt is not None else None
        task = book.task(attempt) if attempt is not None and result is None else None
        found[name] = CellState(attempt, result, task, None)
    waiting = {name: state.task for name, state in found.items() if state.task is not None}
    if not waiting:
        return States(found, "")
    try:
        survey = slurm.survey({task.batch.job for task in waiting.values() if task.batch.job is not None})
    except slurm.SlurmError as error:
        return States(found, str(error))
    for name, task in waiting.items():
        job = survey.state(task.id) if task.id is not None else None
        found[name] = CellState(found[name].attempt, None, task, job)
    return States(found, "")


def show_status(store: Store, names: Sequence[str], out: Console) -> int:
    """The named runs, or all of them, oldest first."""
    if names:
        indexes = {folder: read_index(folder) for folder in map(store.find_experiment, names)}
    else:
        folders = sorted((path.parent for path in store.experiments.glob(f"*/{INDEX}")), key=_age)
        indexes = {folder: index for folder in folders if (index := _read(folder, out)) is not None}
    found = states(store, [cell["id"] for index in indexes.values() for cell in index["cells"]])
    for folder, index in indexes.items():
        _show(store, folder, index["cells"], found, out)
    if found.trouble:
        out.print(f"Nothing is known of jobs: {found.trouble}", soft_wrap=True, markup=False)
    if not indexes:
        out.print(f"No run in {store.root} yet.")
    return 0


def _read(folder: Path, out: Console) -> Json | None:
    """One that is damaged does not hide the others."""
    try:
        return read_index(folder)
    except StoreError as error:
        out.print(str(error), soft_wrap=True, markup=False)
        return None


def _age(folder: Path) -> float:
    return (folder / INDEX).stat().st_mtime


def _show(store: Store, folder: Path, cells: Sequence[Json], found: States, out: Console) -> None:
    verdict = read_json(folder / "verdict.json")
    out.print(f"[bold]{escape(folder.name)}[/]: {verdict['verdict'] if verdict else 'no verdict yet'}")
    varied, states = varied_labels(cells), [found.cells[cell["id"]] for cell in cells]
    left = [_time_left(state.job) for state in states]
    timed = ["time left"] if any(left) else []
    rows = table("cell", *varied, "attempt", "state", *timed, right=["attempt", "time left"])
    for column in rows.columns:
        column.no_wrap = column.header in ("cell", "attempt", "time left")
    for cell, state, time_left in zip(cells, states, left, strict=True):
        labels = (escape(str(cell["labels"].get(key, ""))) for key in varied)
        attempt = str(attempt_number(state.attempt)) if state.attempt is not None else ""
        said = _state(store, cell["id"], state)
        rows.add_row(cell["id"][:SHORT], *labels, attempt, said, *([time_left] if timed else []))
    out.print(rows)


def _state(store: Store, cell: str, state: CellState) -> str:
    if state.attempt is None:
        return "not started"
    if state.result is not None:
        error = state.result["error"]
        return str(state.result["verdict"]) + (f" ({error['type']})" if error else "")
    if state.task is not None:
        return _job_state(state.task, state.job) + (_standing(state.attempt) if _runs(state.job) else "")
    if store.holder(cell) is None:
        return "stopped without a result"
    return f"running since {_clock(state.attempt)}{_standing(state.attempt)}"


def _standing(attempt: Path) -> str:
    """A line of step and slowest rank, as the driver last saw them; empty before the first gang."""
    standing = read_json(attempt / STANDING)
    return f"\n{standing['gang']} {standing['step']}, {slowest_rank(standing)}" if standing else ""


def _runs(job: slurm.JobState | None) -> bool:
    return job is not None and job.state in ("RUNNING", "SUSPENDED")


def _time_left(job: slurm.JobState | None) -> str:
    """Of a job that has begun: what waits has used nothing of its limit yet."""
    return job.left if job is not None and _runs(job) and job.left[:1].isdigit() else ""


def _job_state(task: Task, job: slurm.JobState | None) -> str:
    if task.id is None:
        return "written, not known to be submitted: run it again"
    if job is None:
        return f"job {task.id} unknown to Slurm, no result"
    where = f" on {job.nodes}" if job.nodes else ""
    why = f" ({job.reason})" if job.state == "PENDING" and job.reason not in ("", "None") else ""
    return f"job {task.id} {job.state}{why}{where}" + (", no result" if job.is_finished else "")


def _clock(attempt: Path) -> str:
    return time.strftime("%H:%M:%S", time.localtime(attempt.stat().st_mtime))
