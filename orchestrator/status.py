"""What the cells of the runs in a store are doing."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from orchestrator import slurm
from orchestrator.show import SHORT, table
from orchestrator.store import Store, StoreError, read_json
from orchestrator.submit import JOB


def show_status(store: Store, names: Sequence[str], out: Console) -> int:
    """The named runs, or all of them, oldest first."""
    if names:
        folders = [store.find_experiment(name) for name in names]
    else:
        folders = sorted((path.parent for path in store.experiments.glob("*/cells.json")), key=_age)
    for folder in folders:
        _show(store, folder, out)
    if not folders:
        out.print(f"No run in {store.root} yet.")
    return 0


def _age(folder: Path) -> float:
    return (folder / "cells.json").stat().st_mtime


def _show(store: Store, folder: Path, out: Console) -> None:
    index = read_json(folder / "cells.json")
    verdict = read_json(folder / "verdict.json")
    out.print(f"[bold]{escape(folder.name)}[/]: {verdict['verdict'] if verdict else 'no verdict yet'}")
    cells = index["cells"]
    varied = [key for key in cells[0]["labels"] if len({cell["labels"].get(key) for cell in cells}) > 1]
    rows = table("cell", *varied, "attempt", "state")
    for cell in cells:
        labels = (escape(str(cell["labels"].get(key, ""))) for key in varied)
        rows.add_row(cell["id"][:SHORT], *labels, *_state(store, cell))
    out.print(rows)


def _state(store: Store, cell: dict[str, Any]) -> tuple[str, str]:
    attempts = store.attempts(cell["id"])
    if not attempts:
        return "", "not started"
    attempt = attempts[-1]
    result = store.result(attempt)
    if result is not None:
        error = f" ({result['error']['type']})" if result["error"] else ""
        return attempt.name, result["verdict"] + error
    try:
        with store.locked(cell["id"]):
            return attempt.name, _job_state(attempt)
    except StoreError:
        return attempt.name, f"running since {_clock(attempt)}"


def _job_state(attempt: Path) -> str:
    record = read_json(attempt / JOB)
    if record is None:
        return "stopped without a result"
    try:
        state = slurm.job_state(str(record["job"]))
    except slurm.SlurmError as error:
        return f"job {record['job']}, unknown: {error}"
    return f"job {record['job']} {state.state or 'gone'}" + (", no result" if state.ended else "")


def _clock(attempt: Path) -> str:
    return time.strftime("%H:%M:%S", time.localtime(attempt.stat().st_mtime))
