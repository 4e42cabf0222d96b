"""The verb `logs`: what the driver and the ranks of a cell's latest attempt wrote, also while they write. Works on any
machine that sees the store; where Slurm can be asked, too, a job that died is not waited for."""

import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from orchestrator.cell import Cell
from orchestrator.cluster import slurm
from orchestrator.cluster.history import read_cell, read_index
from orchestrator.cluster.jobs import Book
from orchestrator.judge.attempt import REFERENCE
from orchestrator.show import SHORT
from orchestrator.starts import ARMS
from orchestrator.store import Store, StoreError, read_json
from orchestrator.verbs.arguments import Parser, UsageError
from orchestrator.verbs.selection import only_cell

Json = dict[str, Any]
HELP = """\
What the latest attempt at a cell of a run wrote. NAME is a run, or the beginning of its
name; CELL the beginning of the cell's id or of its labels, such as `layerwise` or
`tp2 direct`, and may be left out where the run has one cell.

Without flags it is the driver's log (and the output of its Slurm job); with --rank or
--arm those of ranks, each line behind `<gang>/rank-<number> | ` where there are several."""
EVERY = -1  # --rank all
POLL_S = 0.5
QUIET_S, SELDOM_S = (
    10.0,
    120.0,
)  # of silence, before Slurm is asked for the first time; at most between questions
INTERRUPTED = 130
_LOG = re.compile(r"(rank-(?P<rank>\d+)|node(-\d+)?)\.log")


def main(arguments: Sequence[str]) -> int:
    parser = Parser("logs", "NAME [CELL] [--rank N|all] [--arm base|candidate] [--follow]", HELP)
    parser.add_argument("--rank", type=_rank, metavar="N|all", help="of this rank, or driver and all ranks")
    parser.add_argument("--arm", choices=ARMS, help="only gangs of this arm; alone: all its ranks")
    parser.add_argument(
        "--follow", action="store_true", help="go on until the attempt has its result, or its job is over"
    )
    options, store, names = parser.read(arguments)
    if not names:
        raise UsageError("logs needs the name of a run; `runs` lists them.")
    folder = store.find_experiment(names[0])
    entry = only_cell(folder, read_index(folder)["cells"], names[1:])
    cell = read_cell(store, entry["id"])
    _refuse_absent(cell, options.rank, options.arm)
    attempt = _attempt(store, entry)
    logs = Logs(store, cell, attempt, options.rank, options.arm)
    try:
        _show(logs, options.follow, sys.stdout)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _rank(text: str) -> int:
    if text != "all" and not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is neither the number of a rank nor `all`")
    return EVERY if text == "all" else int(text)


def _refuse_absent(cell: Cell, rank: int | None, arm: str | None) -> None:
    """What no attempt at the cell can have."""
    layout = cell["parallelism"]
    count = layout["nodes"] * layout["gpus_per_node"]
    if rank is not None and rank >= count:
        raise UsageError(f"--rank {rank}: the cell has ranks 0 to {count - 1}.")
    if arm is not None and cell["code"][arm] is None:
        raise UsageError(f"--arm {arm}: the cell has one arm, candidate, since code.{arm} is not set.")


def _attempt(store: Store, entry: Json) -> Path:
    """The one that counts for the run, else the latest. Raises StoreError."""
    name = f"cell {entry['id'][:SHORT]}"
    attempts = store.attempts(entry["id"])
    if entry.get("attempt") is not None:
        attempts = [store.cell_dir(entry["id"]) / entry["attempt"]]
    if not attempts:
        raise StoreError(f"There is no attempt at {name} yet: `status` says what it waits for.")
    if not attempts[-1].is_dir():
        raise StoreError(f"{attempts[-1]} is not there any more: somebody removed the attempt at {name}.")
    return attempts[-1]


@dataclass
class Logs:
    """The chosen logs of one attempt, and how far each has been read. rank: None for the driver alone."""

    store: Store
    cell: Cell
    attempt: Path
    rank: int | None
    arm: str | None
    _read: dict[str, int] = field(default_factory=dict)

    def files(self) -> dict[str, Path]:
        """By the name that stands before its lines. A log is there once somebody has written."""
        found = {}
        if self.arm is None and self.rank in (None, EVERY):
            found = {"driver": self.attempt / "driver.log"}
            task = Book(self.store).task(self.attempt)
            if task is not None and task.output is not None:
                found = {"job": task.output, **found}
        if self.rank is not None or self.arm is not None:
            found |= {name: path for gang in self._gangs() for name, path in self._of_gang(*gang)}
        return {name: path for name, path in found.items() if path.is_file()}

    def _gangs(self) -> Iterator[tuple[str, Path]]:
        """Names and folders. A fresh start that has become a reference has moved away from the attempt."""
        for folder in sorted(path for path in self.attempt.iterdir() if path.is_dir()):
            yield folder.name, folder
        origin = f"{self.attempt.parent.name}/{self.attempt.name}"
        for name, folder in self.store.reference_dirs(self.cell).items():
            about = read_json(folder / REFERENCE)
            if about is not None and about["attempt"] == origin:
                yield name.replace("/", "-"), folder

    def _of_gang(self, gang: str, folder: Path) -> Iterator[tuple[str, Path]]:
        if self.arm is not None and (gang.startswith("base") != (self.arm == "base")):
            return
        for path in sorted(folder.glob("*.log")):
            match = _LOG.fullmatch(path.name)
            is_wanted = self.rank in (None, EVERY) or (
                match and match["rank"] and int(match["rank"]) == self.rank
            )
            if match and is_wanted:
                yield f"{gang}/{path.stem}", path

    def new(self, complete: bool) -> Iterator[tuple[str, str]]:
        """Lines written since the last call, each with its log's name. complete: a line without its end waits."""
        for name, path in self.files().items():
            begin = self._read.get(name, 0)
            try:
                with path.open("rb") as file:
                    file.seek(begin)
                    text = file.read()
            except FileNotFoundError:  # it has just moved; its new place is found next time
                continue
            if complete:
                text = text[: text.rfind(b"\n") + 1]
            self._read[name] = begin + len(text)
            for line in text.splitlines():
                yield name, line.decode(errors="replace")


class FollowedJob:
    """The job of an attempt, which may end without a result. Slurm is asked only while nothing is written, ever more
    seldom, and believed when it has said for `cluster.lost_after_s` that the job is over."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._is_over = False  # says the last answer
        self.is_heard()

    def is_heard(self) -> None:
        """Something was written."""
        self._pause = QUIET_S
        self._next = time.monotonic() + self._pause

    def ended(self) -> str:
        """How the job ended without a result; "" while it may go on, and where Slurm cannot be asked."""
        if self._logs.cell["cluster"]["kind"] != "slurm" or time.monotonic() < self._next:
            return ""
        said = self._ask()
        if said and self._is_over:
            return said
        self._is_over = bool(said)
        grace = float(self._logs.cell["cluster"]["lost_after_s"])
        self._pause = min(2 * self._pause, SELDOM_S)
        self._next = time.monotonic() + (grace if said else self._pause)
        return ""

    def _ask(self) -> str:
        """A sentence about a job that is over, else ""."""
        task = Book(self._logs.store).task(self._logs.attempt)
        if task is None or task.batch.job is None or task.id is None:
            return ""
        try:
            state = slurm.survey([task.batch.job]).state(task.id)
        except slurm.SlurmError:
            return ""  # this machine is no client of it, or it does not answer now
        if state is not None and not state.is_finished:
            return ""
        says = f"says {state.state}" if state is not None else "does not know it any more"
        return (
            f"job {task.id} is over (Slurm {says}) and left no result; resume the run to try the cell again"
        )


def _show(logs: Logs, follow: bool, out: TextIO) -> None:
    """Writes lines as they come, to the attempt's end where it is followed; says how it ended beside them."""
    is_alone, has_written = not follow and len(logs.files()) == 1, False
    job = FollowedJob(logs)
    while True:
        ended = _ended(logs) or (
            job.ended() if follow else ""
        )  # asked first: what was written before is read below
        for name, line in logs.new(complete=follow and not ended):
            has_written = True
            job.is_heard()
            out.write(f"{line}\n" if is_alone else f"{name} | {line}\n")
        out.flush()
        if ended or not follow:
            break
        time.sleep(POLL_S)
    which = f"{logs.attempt.parent.name[:SHORT]} {logs.attempt.name}"
    nothing = "" if has_written else "nothing was written; "
    print(f"{which}: {nothing}{ended or 'no result yet'}", file=sys.stderr)


def _ended(logs: Logs) -> str:
    """How the attempt ended; "" while it may go on."""
    result = logs.store.result(logs.attempt)
    if result is not None:
        error = result["error"]
        return str(result["verdict"]) + (f" {error['type']}: {error['message']}" if error else "")
    is_job = logs.cell["cluster"]["kind"] == "slurm"
    if is_job or logs.store.holder(logs.attempt.parent.name) is not None:
        return ""
    return "it stopped without a result"
