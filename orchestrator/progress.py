"""Shows how far the gangs of an attempt are: a live table on a terminal, one line per event elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from orchestrator.gangs.signs import slowest_rank
from orchestrator.judge.sentences import ranks_text
from workloads.spec import GangSpec

Record = Mapping[str, Any]


@dataclass
class StepState:
    """How many ranks are in a step. `begun`, `ended`: clock of the first rank's start and of the last one's end."""

    started: int = 0
    done: int = 0
    begun: float = 0.0
    ended: float = 0.0


@dataclass
class GangState:
    ranks: int
    steps: Sequence[str]  # "update new", "observe updated"
    states: list[StepState] = field(default_factory=list)
    failed: str = ""
    slowest: str = ""  # rank of its step

    def current(self) -> int:
        """Index of the latest step that a rank has entered, -1 before the first."""
        return max((i for i, state in enumerate(self.states) if state.started), default=-1)


class Board:
    """What is known of every gang, from the events and progress records of `orchestrator.gangs.gang`."""

    def __init__(self) -> None:
        self.gangs: dict[str, GangState] = {}

    def expect(self, specs: Sequence[GangSpec]) -> None:
        """Gangs that will run, in this order."""
        for spec in specs:
            steps = [f"{step.do} {step.name or step.checkpoint}" for step in spec.steps]
            states = [StepState() for _ in steps]
            self.gangs[spec.name] = GangState(spec.parallelism.ranks, steps, states)

    def take(self, record: Record) -> str | None:
        """Updates the board; a line for people when this is the first start or the last end of a step, or the
        end of a rank that was not to end."""
        if record["kind"] == "step":
            return self._step(record)
        if record["kind"] == "standing":
            self.gangs[record["gang"]].slowest = slowest_rank(record)
        if record["kind"] == "rank_exited" and record["code"] != 0 and not record["stopped"]:
            gang = self.gangs[record["gang"]]
            how = record["signal"] or f"exit code {record['code']}"
            gang.failed = gang.failed or f"rank {record['rank']}: {how}"
            return f"{record['gang']}: rank {record['rank']} on node {record['node']} ended with {how}"
        return None

    def _step(self, record: Record) -> str | None:
        gang, index = self.gangs[record["gang"]], record["index"]
        state = gang.states[index]
        name = f"{record['gang']} {index + 1}/{len(gang.steps)} {gang.steps[index]}"
        if record["state"] == "start":
            state.started += 1
            if state.started > 1:
                return None
            state.begun = record["time"]
            return f"{name}: started"
        state.done += 1
        state.ended = max(state.ended, record["time"])
        if state.done < gang.ranks:
            return None
        return f"{name}: done by {ranks_text(gang.ranks)} in {state.ended - state.begun:.1f} s"

    def __rich__(self) -> Table:
        table = Table("gang", "step", "ranks done", "elapsed", "slowest", box=None, pad_edge=False)
        for name, gang in self.gangs.items():
            table.add_row(name, *self._row(gang))
        return table

    def _row(self, gang: GangState) -> tuple[str, ...]:
        index = gang.current()
        if gang.failed:
            return (f"[red]{gang.failed}[/red]",)
        if index < 0:
            return "[dim]waiting[/dim]", f"0/{gang.ranks}", ""
        state = gang.states[index]
        whole = state.done == gang.ranks
        text = f"{index + 1}/{len(gang.steps)} {gang.steps[index]}"
        until = state.ended if whole else time.time()
        slowest = "" if whole else gang.slowest
        return text, f"{state.done}/{gang.ranks}", f"{until - state.begun:.0f} s", slowest


class Display:
    """Feeds a board and writes its lines."""

    def __init__(self, board: Board, write: Callable[[str], None]) -> None:
        self.board = board
        self._write = write

    def note(self, text: str) -> None:
        """A phase of the driver itself."""
        self._write(f"{time.strftime('%H:%M:%S')} {text}")

    def take(self, record: Record) -> None:
        line = self.board.take(record)
        if line is not None:
            self.note(line)


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """On a terminal a live table below the notes, which stays when it ends; elsewhere only the notes."""
    board = Board()

    def write(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield Display(board, write)
        return
    with Live(board, console=console, refresh_per_second=4):
        yield Display(board, write)
