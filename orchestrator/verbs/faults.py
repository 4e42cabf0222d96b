"""The verb `faults`: which known failures there are, where each was last caught, and the matrix that proves it."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from orchestrator.config.compose import ConfigError
from orchestrator.store import Store, read_json, write_json
from orchestrator.verbs import faults_matrix as matrix
from orchestrator.verbs.faults_matrix import CLEAN, GOOD, MatrixCell, Outcome, Play
from orchestrator.verbs.faults_run import judged, lanes, play
from workloads import faults
from workloads.faults._about import KINDS

Json = dict[str, Any]

RECORD = "faults.json"  # of a matrix that was run
NAME = "fault_matrix"
NOT_PLAYED = "not played"
MAX_COLUMNS = 4  # of more models one column shows all
ALL = "all models"
_MARKS = {"missed": "MISSED", "misnamed": "OTHER", "false_alarm": "ALARM", "error": "ERROR"}
HELP = """\
python -m orchestrator faults [NAME...] [--run] [--sample] [OVERRIDES...]

Every check is proved by failures that are injected on purpose. Without options: the known ones, what goes wrong,
the public report, the diagnosis that must come first, and where each was last caught in the run store.

  NAME         only these faults (see the list); all when none is named
  --run        play the matrix faults x models x load paths and show what caught each: every cell in which a fault
               can do something must end with its diagnosis, and clean cells without a finding
  --pairs      with --run: every fault once on every model and once on every load path, instead of on all
               combinations of the two, and clean cells likewise
  --sample     with --run: one cell of every fault and one clean cell of every model, always the same ones
  model=A,B    only these models; load_path=A,B only these load paths; others are overrides of every cell
  store=PATH   where results are kept and looked for; finished cells are reused unless rerun=true

  python -m orchestrator faults stale_padding --run model=kimi_k3_tiny
  python -m orchestrator +exp=fault_matrix load_path=direct code.candidate.faults=[stale_padding]   one cell, in full

Exit codes: 0 every fault caught and named, no false alarm; 1 otherwise; 2 wrong usage; 3 a cell could not be played"""


def show(store: Store, names: Sequence[str], out: Console) -> int:
    """The list. Returns the exit code."""
    caught = _last_caught(store, names)
    for kind, title in KINDS.items():
        own = [name for name in names if faults.about(name).kind == kind]
        if not own:
            continue
        out.print(f"\n[bold]{kind}[/] {title}")
        for name in own:
            about = faults.about(name)
            needs = f"; needs {', '.join(about.needs)}" if about.needs else ""
            out.print(
                Padding(f"[bold]{name}[/]  {escape(faults.sentence(name))}", (0, 0, 0, 2), expand=False)
            )
            told = (
                f"via {', '.join(about.via)}{needs}; stands for {escape(', '.join(about.reports))}\n"
                f"must be found as {about.finding}; last caught: {escape(caught.get(name, 'never here'))}"
            )
            out.print(Padding(told, (0, 0, 0, 4), expand=False))
    return 0


def _last_caught(store: Store, names: Sequence[str]) -> dict[str, str]:
    """Where each fault was caught under its expected name, by the newest run that did so."""
    found: dict[str, str] = {}
    if store.experiments.is_dir():
        for folder in sorted(
            store.experiments.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True
        ):
            for name, where in _caught(folder):
                if name in names:
                    found.setdefault(name, where)
            if len(found) == len(names):
                break
    return found


def _caught(folder: Path) -> Iterator[tuple[str, str]]:
    for one in (read_json(folder / RECORD) or {}).get("cells", ()):
        if one["state"] == "caught":
            yield one["fault"], f"{one['model']}, {one['load_path']}, in {folder.name}"
    for cell in (read_json(folder / "verdict.json") or {}).get("cells", ()):
        fault, labels = cell["labels"].get("faults", ""), cell["labels"]
        codes = [finding["code"] for finding in cell["findings"] if finding["arm"] == "candidate"]
        if fault in faults.names() and codes[:1] == [faults.about(fault).finding]:
            yield fault, f"{labels.get('model')}, {labels.get('load_path')}, in {folder.name}"


def run(
    store: Store, cells: Sequence[MatrixCell], overrides: Sequence[str], rerun: bool, out: Console
) -> int:
    """Plays the cells that have no result yet, shows and stores the table, also of a run that is broken off. Returns
    the exit code."""
    planned = matrix.planned(cells, overrides)
    folder = store.new_experiment(NAME)
    outcomes = {} if rerun else dict(kept(store, planned))
    missing = [one for name, one in planned.items() if name not in outcomes]
    out.print(f"{folder.name}: cells {len(planned)}, to play {len(missing)}, on {lanes()} cores")
    progress = _Progress(out, len(planned), len(missing))

    def take(one: Play, result: Json) -> None:
        outcomes[one.planned.id] = matrix.outcome(one.cell, result)
        progress.show(outcomes[one.planned.id])

    try:
        play(store, missing, folder, take)
    finally:
        ordered = [outcomes[name] for name in planned if name in outcomes]
        counts = _counts(ordered) | ({NOT_PLAYED: left} if (left := len(planned) - len(ordered)) else {})
        record = {
            "experiment": folder.name,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": progress.seconds(),
            "counts": counts,
            "cells": [one.record() for one in ordered],
        }
        write_json(folder / RECORD, record)
        show_matrix(ordered, out)
        out.print(
            f"{', '.join(f'{n} {state}' for state, n in counts.items())}; {folder / RECORD}", soft_wrap=True
        )
    return 3 if "error" in counts else 1 if set(counts) - set(GOOD) else 0


def kept(store: Store, planned: Mapping[str, Play]) -> Iterator[tuple[str, Outcome]]:
    """What earlier runs showed. What was not caught is judged again, since rules may have got better."""
    for name, one in planned.items():
        for attempt in reversed(store.attempts(name)):
            result = store.result(attempt)
            if result is None:
                continue
            found = matrix.outcome(one.cell, result)
            if found.state not in (*GOOD, "error") and result["error"] is None:
                found = matrix.outcome(one.cell, judged(store, one, attempt))
            if found.state != "error":
                yield name, found
                break


class _Progress:
    """A line for each cell: what it showed, how far all are, and how long the rest takes at this speed."""

    def __init__(self, out: Console, cells: int, missing: int) -> None:
        self._out, self._cells, self._missing, self._done = out, cells, missing, 0
        self._began = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def show(self, one: Outcome) -> None:
        self._done += 1
        left = self._missing - self._done
        minutes = self.seconds() / self._done * left / 60
        what = (
            _sentence(one)
            if one.state not in GOOD
            else f"{one.fault} on {one.model}, {one.load_path}: {one.state}"
        )
        where = f"{self._cells - left} of {self._cells}, {minutes:.0f} min left"
        self._out.print(f"{where}: {what}", soft_wrap=True)


def _counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    states = [one.state for one in outcomes]
    return {state: states.count(state) for state in dict.fromkeys(sorted(states))}


def show_matrix(outcomes: Sequence[Outcome], out: Console) -> None:
    """A row for each fault, a column for each model, or one for all: on how many load paths it was caught, of how many.
    Below, each cell that did not come out as it must, with what was found instead."""
    models = list(dict.fromkeys(one.model for one in outcomes))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("fault", no_wrap=True)
    table.add_column("diagnosis", overflow="fold")
    shown = models if len(models) <= MAX_COLUMNS else [ALL]
    for model in shown:
        table.add_column(model.removesuffix("_tiny"), overflow="fold")
    for fault in dict.fromkeys(one.fault for one in outcomes):
        own = [one for one in outcomes if one.fault == fault]
        name = "(clean)" if fault == CLEAN else fault
        marks = (_mark([one for one in own if model in (one.model, ALL)]) for model in shown)
        table.add_row(name, own[0].expected or "no finding", *marks)
    out.print(table)
    for one in outcomes:
        if one.state not in GOOD:
            out.print(_sentence(one), soft_wrap=True)


def _mark(outcomes: Sequence[Outcome]) -> str:
    """`4/4`, and what went wrong elsewhere; `-` where the fault can do nothing."""
    if not outcomes:
        return "-"
    good = sum(one.state in GOOD for one in outcomes)
    wrong = dict.fromkeys(_MARKS[one.state] for one in outcomes if one.state not in GOOD)
    return " ".join([f"{good}/{len(outcomes)}", *wrong])


def _sentence(one: Outcome) -> str:
    what = "the clean cell" if one.fault == CLEAN else one.fault
    found = ", ".join(dict.fromkeys(one.found)) or "nothing"
    return escape(
        f"{_MARKS[one.state]}: {what} on {one.model}, {one.load_path}: expected {one.expected or 'no finding'}, found "
        f"{found}. {one.detail}"
    )


def main(names: Sequence[str], values: Mapping[str, str], flags: Collection[str], out: Console) -> int:
    """names: of faults, every one where none is named. values: overrides by key; flags: --run, --pairs, --sample."""
    unknown = sorted(set(names) - set(faults.names()))
    if unknown:
        known = ", ".join(faults.names())
        raise ConfigError([f"{unknown[0]!r} is not a fault; the faults are: {known}."])
    wanted, overrides = list(names) or faults.names(), dict(values)
    store, rerun = overrides.pop("store", "runs"), overrides.pop("rerun", "false")
    if "--run" not in flags:
        return show(Store(store.strip("'\"")), wanted, out)
    models, paths = (
        overrides.pop(key).split(",") if key in overrides else [] for key in ("model", "load_path")
    )
    lines = [f"{key}={value}" for key, value in overrides.items()]
    cells = matrix.cells(matrix.places(models, paths, lines), wanted)
    if "--pairs" in flags:
        cells = matrix.pairs(cells)
    if "--sample" in flags:
        cells = matrix.sample(cells)
    return run(Store.open(store.strip("'\"")), cells, lines, rerun == "true", out)
