"""Runs the cells of an experiment that are not finished, then writes its verdict and reports."""

import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from orchestrator.cell import Cell
from orchestrator.cluster import follow, submit
from orchestrator.cluster.attempts import AGAIN, failure_type
from orchestrator.cluster.history import (
    INDEX,
    Experiment,
    lacking,
    load,
    read_cell,
    read_history,
    read_index,
    stands,
)
from orchestrator.cluster.jobs import Book
from orchestrator.config.planning import Plan
from orchestrator.failure import Failure
from orchestrator.here import run_here
from orchestrator.judge.policy import combine, judge_attempt
from orchestrator.report.reproduction import reproduction
from orchestrator.result import unjudged
from orchestrator.starts import cheapest_order
from orchestrator.store import RESULT, Store, attempt_number, read_json, write_json

Json = dict[str, Any]


def start(store: Store, plan: Plan, command: Sequence[str]) -> Path:
    """Writes the cells, and `cells.json` of a new experiment: what it consists of, in the order of its table."""
    for one in plan.cells:
        store.write_cell(one.cell)
    folder = store.new_experiment(plan.name)
    cells = [
        {
            "id": one.id,
            "labels": one.cell["labels"],
            "arguments": list(one.arguments),
            "attempt": None,
            "before": _ended(store, one.id),
        }
        for one in plan.cells
    ]
    index = {
        "experiment": folder.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": list(command),
        "rerun": plan.rerun,
        "cells": cells,
    }
    write_json(folder / INDEX, index)
    return folder


def _ended(store: Store, cell: str) -> int:
    """Number of the last attempt at a cell that has a result: those after it are the new experiment's as well."""
    ended = [path for path in store.attempts(cell) if store.result(path) is not None]
    return attempt_number(ended[-1]) if ended else 0


def run(store: Store, folder: Path, out: Console, watch: bool) -> int:
    """Runs what an experiment lacks: on Slurm, which is followed to the end only with `watch`, and on this machine.
    Returns the exit code of the verdict; of what was submitted and not followed, 3 where Slurm refused something, else
    0."""
    labels = {entry["id"]: entry["labels"] for entry in read_index(folder)["cells"]}
    here, remote = load(store, folder, on_slurm=False), load(store, folder)
    local, jobs = lacking(store, here), lacking(store, remote)
    local = [local[number] for number in cheapest_order([here.cells[name] for name in local])]
    _refuse_busy(store, local)
    out.print(f"{escape(folder.name)}: cells {len(labels)}, to run {len(local) + len(jobs)}")
    look = bring_on(store, remote, out) if remote.cells else follow.Look(is_over=True)
    for number, name in enumerate(local, 1):
        of = " ".join(f"{key}={value}" for key, value in labels[name].items())
        out.print(f"\ncell {number} of {len(local)}, {name[:12]}: {escape(of)}", soft_wrap=True)
        _run_cell(store, here, name, out)
    if watch and remote.cells:
        follow.watch(store, remote, plainly(out))
    elif not look.is_over:
        return _detached(store, remote, look, folder, out)
    chosen = attempts_that_count(store, here) | attempts_that_count(store, remote)
    code = conclude(store, folder, chosen, out)
    _mirror(store, [chosen[name] for name in (*local, *jobs) if name in chosen], out)
    return code


def _run_cell(store: Store, here: Experiment, name: str, out: Console) -> None:
    """On a Ray cluster as often as the budget of its failures allows, as on Slurm; what this machine breaks, it would
    break again."""
    if not run_here(store, here, name):
        out.print("another operator has measured or cancelled it meanwhile")
        return
    while here.cells[name]["cluster"]["kind"] == "ray":
        history = read_history(store, Book(store), name, here.before[name])
        if stands(store, here, name, history) != AGAIN:
            return
        out.print(f"{failure_type(history.results[-1])}: tried again", markup=False)
        run_here(store, here, name)


def bring_on(store: Store, experiment: Experiment, out: Console, tries: int = 3) -> follow.Look:
    """Submits what is missing and says so; tries again where Slurm does not answer at once."""
    for number in range(tries):
        look = follow.advance(store, experiment, plainly(out))
        if not look.trouble:
            break
        out.print(look.trouble, soft_wrap=True, markup=False)
        time.sleep(number)
    return look


def _detached(store: Store, remote: Experiment, look: follow.Look, folder: Path, out: Console) -> int:
    refused = [name for name in remote.cells if _is_refused(store, name)]
    counts = ", ".join(f"{word} {n}" for word, n in sorted(Counter(look.words.values()).items()))
    out.print(f"{folder.name}: {counts}", markup=False)
    out.print(f"python -m orchestrator status {folder.name} store={store.root}", soft_wrap=True, markup=False)
    return 3 if refused or look.trouble else 0


def _is_refused(store: Store, cell: str) -> bool:
    attempts = store.attempts(cell)
    result = store.result(attempts[-1]) if attempts else None
    return result is not None and result["error"] is not None and result["error"]["type"] == submit.REFUSED


def attempts_that_count(store: Store, experiment: Experiment) -> dict[str, Path]:
    """By cell: the last attempt of the experiment that has a result, else the measurement that it reuses."""
    book, found = Book(store), {}
    for name, before in experiment.before.items():
        if name not in experiment.cells:
            continue
        history = read_history(store, book, name, before)
        earlier = store.finished(name)
        if history.attempts:
            found[name] = history.attempts[-1]
        elif earlier is not None:
            found[name] = store.cell_dir(name) / str(earlier["attempt"])
    return found


def plainly(out: Console) -> Callable[[str], None]:
    """Prints lines as they are."""
    return lambda text: out.print(text, soft_wrap=True, markup=False, highlight=False)


def _mirror(store: Store, attempts: Sequence[Path], out: Console) -> None:
    """Copies the results of these attempts into W&B; what it refuses is said and changes nothing."""
    from orchestrator.report.wandb_mirror import MirrorError, mirror_attempt

    folder = store.root / "wandb"
    for attempt in attempts:
        cell, result = read_json(attempt.parent / "cell.json"), store.result(attempt)
        if result is None or not cell["wandb"]["enabled"]:
            continue
        try:
            mirror_attempt(cell, result, folder)
        except MirrorError as error:
            out.print(f"{error}", soft_wrap=True)


def _refuse_busy(store: Store, cells: Sequence[str]) -> None:
    """Before anything runs: a cell that another process runs is a usage error."""
    for name in cells:
        with store.locked(name):
            pass


def conclude(store: Store, folder: Path, chosen: Mapping[str, Path], out: Console) -> int:
    """Notes which attempts count, and writes verdict and reports from their results."""
    with store.submitting():  # another operator may resume the experiment, which changes the same file
        index = read_index(folder)
        for entry in index["cells"]:
            if entry["id"] in chosen:
                entry["attempt"] = chosen[entry["id"]].name
        write_json(folder / INDEX, index)
    return write_verdict(store, folder, out)


def judge(store: Store, folder: Path, out: Console) -> int:
    """Judges the records of every attempt that counts again, with the rules of today."""

    def again(cell: Cell, attempt: Path, result: Json) -> Json:
        if result["error"] is not None:
            return result  # it ended without records to judge
        judged = judge_attempt(cell, attempt, store.reference_dirs(cell))
        judged |= {key: result[key] for key in ("seconds", "starts")}  # the driver's, who saw all gangs
        write_json(attempt / RESULT, judged)
        return judged

    return write_verdict(store, folder, out, again)


def write_verdict(
    store: Store, folder: Path, out: Console, revise: Callable[[Cell, Path, Json], Json] | None = None
) -> int:
    """verdict.json, report.md and report.html of an experiment, and its table; returns the exit code."""
    from orchestrator.report.html import html
    from orchestrator.report.markdown import markdown
    from orchestrator.report.table import print_table

    index = read_index(folder)
    results = []
    for entry in index["cells"]:
        results += _results(store, entry, revise)
    verdict = combine(results, index["experiment"])
    write_json(folder / "verdict.json", verdict)
    (folder / "report.md").write_text(markdown(verdict))
    (folder / "report.html").write_text(html(verdict))
    out.print()
    print_table(verdict, sys.stdout)
    out.print(f"\n{folder / 'report.html'}", soft_wrap=True)
    return int(verdict["exit_code"])


def _results(store: Store, entry: Json, revise: Callable[[Cell, Path, Json], Json] | None) -> list[Json]:
    """Results of a cell up to the attempt that counts; one that says NOT_RUN when there is none."""
    cell = read_cell(store, entry["id"])
    attempts = [path for path in store.attempts(entry["id"]) if path.name <= (entry["attempt"] or "~")]
    found = [(path, result) for path in attempts if (result := store.result(path)) is not None]
    if not found:
        failure = Failure(
            "stopped", "The experiment ended before this cell had a result; run the same command again."
        )
        return [unjudged(cell, entry["id"], "", "NOT_RUN", failure)]
    earlier, (path, last) = [result for _, result in found[:-1]], found[-1]
    counted = revise(cell, path, last) if revise is not None else last
    # A reused cell bears the names of this experiment.
    named = {**counted, "labels": entry["labels"]}
    return [*earlier, {**named, "reproduction": reproduction(cell, named, path, entry.get("arguments"))}]
