"""Which attempts at the cells of an experiment on Slurm belong to it, and where each cell stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.attempts import DONE, FAILED, WAITS, standing
from orchestrator.cell import Cell
from orchestrator.jobs import JOB, Book, Task
from orchestrator.store import Store, StoreError, read_json, write_json

Json = dict[str, Any]
INDEX = "cells.json"  # of an experiment


@dataclass(frozen=True)
class Experiment:
    """The cells of an experiment that run on Slurm. before: number of the last attempt of a cell that does not
    belong to the experiment. rerun: results of other experiments do not count."""

    name: str
    cells: Mapping[str, Cell]
    before: Mapping[str, int]
    rerun: bool = False


@dataclass
class History:
    """The attempts at one cell in this experiment. open: handed to Slurm and without a result yet."""

    results: list[Json] = field(default_factory=list)
    attempts: list[Path] = field(default_factory=list)  # of the results
    open: list[Task] = field(default_factory=list)
    is_run_here: bool = False


def load(store: Store, folder: Path) -> Experiment:
    index = read_json(folder / INDEX)
    cells = {entry["id"]: read_json(store.cell_dir(entry["id"]) / "cell.json") for entry in index["cells"]}
    chosen = {name: cell for name, cell in cells.items() if cell["cluster"]["kind"] == "slurm"}
    before = {entry["id"]: entry.get("before", 0) for entry in index["cells"]}
    return Experiment(folder.name, chosen, before, index.get("rerun", False))


def read_history(store: Store, book: Book, name: str, before: int) -> History:
    history = History()
    for attempt in store.attempts(name):
        if int(attempt.name.partition("-")[2]) <= before:
            continue
        result = store.result(attempt)
        if result is not None:
            history.results.append(result)
            history.attempts.append(attempt)
        elif (task := book.task(attempt)) is not None:
            history.open.append(task)
        else:  # of a process on this machine, or of a submitter that died before it had written everything
            history.is_run_here = _is_locked(store, name)
    return history


def _is_locked(store: Store, name: str) -> bool:
    try:
        with store.locked(name):
            return False
    except StoreError:
        return True


def stands(store: Store, experiment: Experiment, name: str, history: History) -> str:
    found = standing(experiment.cells[name]["policy"], history.results)
    if found in (DONE, FAILED) or experiment.rerun:
        return found
    return DONE if store.finished(name) is not None else found


def still_waits(store: Store, history: History) -> bool:
    """Whether the attempt that did not make what the cell needed has not been settled itself."""
    record = read_json(history.attempts[-1] / JOB)
    makers = [store.cell_dir(need["cell"]) / need["attempt"] for need in record["needs"]] if record else []
    return any(store.result(maker) is None for maker in makers)


def renew(store: Store, folder: Path) -> None:
    """Gives cells of an experiment that failed for good new budgets: their attempts so far no longer belong to it."""
    with store.submitting():
        index, experiment = read_json(folder / INDEX), load(store, folder)
        book = Book(store)
        for entry in index["cells"]:
            name = entry["id"]
            if name not in experiment.cells:
                continue
            history = read_history(store, book, name, experiment.before[name])
            found = standing(experiment.cells[name]["policy"], history.results)
            if found in (FAILED, WAITS) and not history.open and not history.is_run_here:
                entry["before"] = int(history.attempts[-1].name.partition("-")[2])
        write_json(folder / INDEX, index)
