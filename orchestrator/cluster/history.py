"""Which attempts at the cells of an experiment belong to it, and where each cell stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.cell import Cell
from orchestrator.cluster.attempts import DONE, FAILED, WAITS, failure_type, is_defect, standing
from orchestrator.cluster.jobs import JOB, Book, Task
from orchestrator.store import Store, StoreError, attempt_number, read_json, write_json

Json = dict[str, Any]
INDEX = "cells.json"  # of an experiment


@dataclass(frozen=True)
class Experiment:
    """The cells of an experiment that run on Slurm, or those that do not. before: number of the last attempt of a
    cell that does not belong to the experiment. rerun: results of other experiments do not count."""

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


def read_index(folder: Path) -> Json:
    """`cells.json` of an experiment. Raises StoreError when it is damaged."""
    index = read_json(folder / INDEX)
    cells = index.get("cells") if isinstance(index, dict) else None
    if not isinstance(cells, list) or not cells or not all(map(_is_entry, cells)):
        raise StoreError(
            f"{folder / INDEX} is damaged: it lists no cells. Run the experiment's command again: finished cells are "
            "found and reused."
        )
    return dict(index)


def _is_entry(cell: Any) -> bool:
    return isinstance(cell, dict) and isinstance(cell.get("id"), str) and isinstance(cell.get("labels"), dict)


def read_cell(store: Store, name: str) -> Cell:
    """Raises StoreError when it is not there."""
    path = store.cell_dir(name) / "cell.json"
    cell = read_json(path)
    if not isinstance(cell, dict):
        raise StoreError(
            f"{path} is not there, or damaged: what was in the folder of cell {name[:12]} is lost. Run the "
            "experiment's command again: it writes the cell and runs it."
        )
    return cell


def load(store: Store, folder: Path, on_slurm: bool = True) -> Experiment:
    """Its cells that run on Slurm, or those that run where their experiment does. Raises StoreError."""
    index = read_index(folder)
    cells = {entry["id"]: read_cell(store, entry["id"]) for entry in index["cells"]}
    chosen = {name: cell for name, cell in cells.items() if (cell["cluster"]["kind"] == "slurm") == on_slurm}
    before = {entry["id"]: entry.get("before", 0) for entry in index["cells"]}
    return Experiment(folder.name, chosen, before, index.get("rerun", False))


def read_history(store: Store, book: Book, name: str, before: int) -> History:
    history = History()
    for attempt in store.attempts(name, before):
        result = store.result(attempt)
        if result is not None:
            history.results.append(result)
            history.attempts.append(attempt)
        elif (task := book.task(attempt)) is not None:
            history.open.append(task)
        else:  # of a process on this machine, or of a submitter that died before it had written everything
            history.is_run_here = store.holder(name) is not None
    return history


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


def lacking(store: Store, experiment: Experiment) -> list[str]:
    """Cells that run, or are to run: neither measured nor failed for good."""
    book, found = Book(store), []
    for name in experiment.cells:
        history = read_history(store, book, name, experiment.before[name])
        if stands(store, experiment, name, history) not in (DONE, FAILED):
            found.append(name)
    return found


def renew(store: Store, folder: Path) -> dict[str, str]:
    """Gives cells of an experiment that failed for good new budgets: their attempts so far no longer belong to it.
    Not those that have a defect. By cell, the failure type of the last attempt that has a result."""
    renewed = {}
    with store.submitting():
        index, book = read_index(folder), Book(store)
        parts = [load(store, folder, on_slurm) for on_slurm in (True, False)]
        for entry in index["cells"]:
            name = entry["id"]
            experiment = next(part for part in parts if name in part.cells)
            history = read_history(store, book, name, experiment.before[name])
            found = standing(experiment.cells[name]["policy"], history.results)
            if found not in (FAILED, WAITS) or history.open or history.is_run_here:
                continue
            if not is_defect(history.results):
                renewed[name] = failure_type(history.results[-1])
                entry |= {"before": attempt_number(history.attempts[-1]), "attempt": None}
        if renewed:
            write_json(folder / INDEX, index)
    return renewed
