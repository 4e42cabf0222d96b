"""The verb `runs`: which runs a store holds, newest first. Reads files only."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from orchestrator.cluster.history import INDEX, read_index
from orchestrator.cluster.jobs import JOB
from orchestrator.show import WIDTH, console, table
from orchestrator.store import Store, StoreError, read_json
from orchestrator.verbs.arguments import Parser

Json = dict[str, Any]
Row = tuple[str, str, str, str]  # all columns but `began`
HELP = """\
The runs in the store, newest first: when they began, how many cells they have, how
these ended, and where they run. `running` also stands for what waits in Slurm's
queue: `status NAME` asks Slurm. Reads files only, from any machine that sees the store."""
COLUMNS = ("run", "began", "cells", "verdicts", "where")
NARROW = ("run", "verdicts", "where")  # a name has the time in it, and the verdicts add up to the cells
# Up to which width a column is not folded: a name is copied into other commands, and verdicts are what a run is for.
WHOLE = {"run": 44, "began": 11, "verdicts": 26}
_HERE = {"local", "ray"}  # clusters whose drivers run where the run was started
_ORDER = ("FAIL", "ERROR", "INCONCLUSIVE", "NOT_RUN", "PASS", "running", "stopped", "not started")


def main(arguments: Sequence[str]) -> int:
    _, store, names = Parser("runs", "[NAME...]", HELP).read(arguments)
    out = console()
    folders = [folder for folder in store.experiments.iterdir() if (folder / INDEX).is_file()]
    chosen = [
        folder for folder in folders if not names or any(folder.name.startswith(name) for name in names)
    ]
    if not chosen:
        out.print(f"No run in {store.root} yet." if not names else f"No run in {store.root} begins so.")
        return 0
    out.print(_table(sorted((_row(store, folder) for folder in chosen), reverse=True), out.width < WIDTH))
    return 0


def _table(rows: Sequence[tuple[float, Row]], is_narrow: bool) -> Table:
    columns = NARROW if is_narrow else COLUMNS
    made = table(*columns, right=["cells"])
    for began, (run, *rest) in rows:
        when = time.strftime("%m-%d %H:%M", time.localtime(began))
        said = dict(zip(COLUMNS, (run, when, *rest), strict=True))
        made.add_row(*(said[column] for column in columns))
    for name, column in zip(columns, made.columns, strict=True):
        column.no_wrap = max(len(str(text)) for text in column.cells) <= WHOLE.get(name, 0)
    return made


def _row(store: Store, folder: Path) -> tuple[float, Row]:
    """When a run began, seconds of the Unix clock, and the cells of its row."""
    try:
        index = read_index(folder)
        began = datetime.fromisoformat(index["created"]).timestamp()
    except (StoreError, KeyError, ValueError):
        return (folder / INDEX).stat().st_mtime, (escape(folder.name), "?", f"{INDEX} is damaged", "?")
    cells = index["cells"]
    kinds = sorted({str(cell["labels"].get("cluster", "?")) for cell in cells})
    host = f" on {index['host']}" if _HERE & set(kinds) and "host" in index else ""
    counts = _text(_counts(store, folder, cells))
    return began, (escape(folder.name), str(len(cells)), counts, escape(", ".join(kinds) + host))


def _counts(store: Store, folder: Path, cells: Sequence[Json]) -> Mapping[str, int]:
    verdict = read_json(folder / "verdict.json")
    if isinstance(verdict, dict) and "counts" in verdict:
        return dict(verdict["counts"])
    return Counter(_state(store, cell) for cell in cells)


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[word]} {word}" for word in _ORDER if counts.get(word))


def _state(store: Store, cell: Json) -> str:
    """Of a cell in a run that has no verdict yet."""
    attempts = store.attempts(cell["id"], cell.get("before", 0))
    result = store.result(attempts[-1]) if attempts else store.finished(cell["id"])
    if result is not None:
        return str(result["verdict"])
    if not attempts:
        return "not started"
    is_running = (attempts[-1] / JOB).exists() or store.holder(cell["id"]) is not None
    return "running" if is_running else "stopped"
