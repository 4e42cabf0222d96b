"""An experiment on the real Slurm whose drivers are toys (toy_cell.py), and operators that are processes."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.cluster.follow import Look, advance
from orchestrator.cluster.history import load
from orchestrator.cluster.jobs import Book, Task
from orchestrator.config.planning import Plan, plan
from orchestrator.experiment import start
from orchestrator.store import Store, read_json

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).parent / "toy_cell.py"
OPERATOR = """
import sys
from pathlib import Path
from orchestrator.cluster.follow import advance
from orchestrator.store import Store
from orchestrator.cluster.history import load
folder = Path(sys.argv[1])
store = Store(folder.parents[1])
advance(store, load(store, folder), print)
"""
QUICK = [
    "cluster=slurm",
    "cluster.exclusive=false",
    "cluster.poll_s=0.5",
    "cluster.time='00:10:00'",
    "cluster.lost_after_s=4",
    "collect=tensors",
    "wandb.enabled=false",
]


def toy_options(folder: Path) -> list[str]:
    """Overrides of cells that run toys. A script stands for their interpreter."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(TOY)])} "$@"\n')
    python.chmod(0o755)
    (folder / "runs" / "toy").mkdir(parents=True, exist_ok=True)
    return [*QUICK, f"cluster.python={python}", f"store={folder / 'runs'}"]


def toys(folder: Path, *overrides: str) -> Plan:
    return plan([*toy_options(folder), *overrides], multirun=True)


class Toys:
    """One experiment of toys. orders: words for its cells, see toy_cell.py."""

    def __init__(self, made: Plan, orders: Mapping[int, Sequence[str]]) -> None:
        self.store = Store.open(made.store)
        self.names = [one.id for one in made.cells]
        for cell, words in orders.items():
            (self.store.root / "toy" / self.names[cell]).write_text(json.dumps(list(words)))
        self.folder = start(self.store, made, [])
        self.said: list[str] = []

    def look(self) -> Look:
        return advance(self.store, load(self.store, self.folder), self.said.append)

    def until(self, what: Callable[["Toys", Look], bool], seconds: float) -> Look:
        deadline = time.monotonic() + seconds
        while not what(self, look := self.look()):
            assert time.monotonic() < deadline, (look, self.said, queue())
            time.sleep(0.3)
        return look

    def go(self) -> None:
        """To the toys that wait for it."""
        (self.store.root / "toy" / "go").touch()

    def over(self, seconds: float) -> None:
        self.until(lambda _, look: look.is_over, seconds)

    def running(self, cell: int, seconds: float) -> None:
        """Until the driver of the cell has begun to measure."""
        deadline = time.monotonic() + seconds
        while not any(line.startswith(self.names[cell]) for line in self.ran()):
            assert time.monotonic() < deadline, (self.said, self.ran(), queue())
            time.sleep(0.2)

    def ran(self) -> list[str]:
        """`CELL/ATTEMPT NODES` of every driver that measured."""
        file = self.store.root / "toy" / "ran"
        return file.read_text().splitlines() if file.exists() else []

    def each_once(self) -> bool:
        return set(Counter(line.partition(" ")[0] for line in self.ran()).values()) <= {1}

    def task(self, cell: int) -> Task:
        task = Book(self.store).task(self.store.attempts(self.names[cell])[-1])
        assert task is not None
        return task

    def job(self, cell: int) -> str:
        job = self.task(cell).id
        assert job is not None
        return job

    def ends(self, cell: int) -> list[str]:
        """Verdicts, or the types of errors, of all attempts."""
        results = [self.store.result(attempt) for attempt in self.store.attempts(self.names[cell])]
        return [(r["error"]["type"] if r["error"] else r["verdict"]) if r else "none" for r in results]

    def error(self, cell: int) -> dict[str, Any]:
        return dict(read_json(self.store.attempts(self.names[cell])[-1] / "result.json")["error"])

    def operator(self, path: Path | None = None) -> "subprocess.Popen[str]":
        """Another process that takes one look. path: searched before PATH."""
        paths = os.pathsep.join([*([str(path)] if path is not None else []), os.environ["PATH"]])
        variables = {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", OPERATOR, str(self.folder)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def shim(folder: Path, name: str, lines: str) -> Path:
    """A folder with a shell script that stands before a command of Slurm, which it may call as $REAL."""
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(f"#!/bin/bash\nREAL=/usr/bin/{name}\n{lines}\n")
    script.chmod(0o755)
    return folder


def control(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True, capture_output=True, timeout=30)


def queue() -> str:
    """Jobs with the reason why they wait, and nodes with the reason why they are down: for the message of a failure."""
    commands = (["squeue", "--all", "-o", "%i %T %r %N"], ["sinfo", "-N", "-o", "%N %T %E"])
    return "\n".join(
        subprocess.run(one, capture_output=True, text=True, timeout=60).stdout for one in commands
    )
