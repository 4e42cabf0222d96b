"""The run store: cells by content, exclusive attempts, atomic JSON, locks that hold between processes."""

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from orchestrator.cell import Cell, cell_id, references
from workloads.loading.paths import MANIFEST

FINISHED = ("PASS", "FAIL", "INCONCLUSIVE", "NOT_RUN")  # an ERROR is no measurement: it is tried again
UPSTREAM = "upstream"  # failure type of a NOT_RUN: another cell did not make what this one needs
RESULT = "result.json"
_NAMED = 12  # runs that a message lists
LOCK_WAIT_S = 180.0  # for another process that submits; longer than a command of Slurm may take


class StoreError(Exception):
    """The store cannot be used. The message is a full sentence."""


class Store:
    """Paths and rules of one run store."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser().resolve()

    @classmethod
    def open(cls, root: Path | str) -> "Store":
        """Creates what is missing and proves that it can be written. Raises StoreError when it cannot."""
        store = cls(root)
        try:
            for folder in (
                store.root,
                store.cells,
                store.references,
                store.checkpoints,
                store.saved,
                store.experiments,
            ):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = store.root / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"store={root} cannot be written ({error.strerror}: {error.filename}): set store= to a folder on a "
                "shared file system that you may write."
            ) from error
        return store

    @property
    def cells(self) -> Path:
        return self.root / "cells"

    @property
    def saved(self) -> Path:
        """State that engines saved for starts of their own kind, by key."""
        return self.root / "saved"

    @property
    def references(self) -> Path:
        return self.root / "references"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def experiments(self) -> Path:
        return self.root / "experiments"

    def cell_dir(self, cell: str) -> Path:
        return self.cells / cell

    def attempts(self, cell: str, after: int = 0) -> list[Path]:
        """Folders of the attempts at a cell whose numbers are higher than `after`, oldest first."""
        found = (path for path in self.cell_dir(cell).glob("attempt-*") if path.name[8:].isdigit())
        return sorted(path for path in found if attempt_number(path) > after)

    def write_cell(self, cell: Cell) -> str:
        """Writes `cell.json` and returns the id. Another experiment may have frozen the same cell for another
        place to run; the latest one counts, under the cell's lock."""
        name = cell_id(cell)
        folder = self.cell_dir(name)
        folder.mkdir(mode=0o700, exist_ok=True)
        if read_json(folder / "cell.json") != cell:
            # Not flushed: a cell that a crash has damaged no longer has its id, and is written again.
            write_json(folder / "cell.json", cell, durable=False)
        return name

    def new_attempt(self, cell: str) -> Path:
        """An empty folder that no other process gets."""
        number = len(self.attempts(cell)) + 1
        while True:
            folder = self.cell_dir(cell) / f"attempt-{number:03d}"
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                number += 1
                continue
            return folder

    def finished(self, cell: str) -> dict[str, Any] | None:
        """The latest result of the cell that measured something."""
        results = (self.result(attempt) for attempt in reversed(self.attempts(cell)))
        return next((r for r in results if r is not None and is_measured(r)), None)

    def result(self, attempt: Path) -> dict[str, Any] | None:
        """`result.json` of an attempt; it counts only for the attempt and cell that it names."""
        result = read_json(attempt / RESULT)
        if not isinstance(result, dict) or "verdict" not in result:
            return None
        own = (result.get("cell"), result.get("attempt")) == (attempt.parent.name, attempt.name)
        return result if own else None

    def holds(self, key: str) -> bool:
        """Whether a reference or saved state of this key is there, complete."""
        return (self.references / key).is_dir() or (self.saved / key / MANIFEST).is_file()

    def reference_dirs(self, cell: Cell) -> dict[str, Path]:
        """Folders of the references of a cell: `fresh.new` for the candidate, `base/fresh.new` for the base."""
        return {
            ref.name if ref.arm == "candidate" else f"{ref.arm}/{ref.name}": self.references / ref.key
            for ref in references(cell)
        }

    def new_experiment(self, name: str) -> Path:
        """`<name>-<time>-<id>`: two starts in the same second get two folders."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = self.experiments / f"{name}-{stamp}-{secrets.token_hex(3)}"
        folder.mkdir(mode=0o700)
        return folder

    def find_experiment(self, name: str) -> Path:
        """Folder of a run: its path, its name, or the latest whose name begins so.

        Raises StoreError when there is none.
        """
        for folder in (Path(name), self.experiments / name):
            if (folder / "cells.json").is_file():
                return folder.resolve()
        found = sorted(self.experiments.glob(f"{name}*/cells.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            known = sorted(path.name for path in self.experiments.iterdir())
            more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
            listed = ", ".join(known[:_NAMED]) or "none"
            raise StoreError(f"There is no run {name!r} in {self.experiments}; there are: {listed}{more}.")
        return found[-1].parent

    @contextmanager
    def locked(self, *cells: str) -> Iterator[list[int]]:
        """Holds the locks of some cells; only one process at a time runs or submits a cell. Yields the locks'
        descriptors: a child that inherits them holds the locks on when this process is killed.

        Raises StoreError at once, naming the holder, when another process has one.
        """
        with ExitStack() as stack:
            yield [stack.enter_context(_lock(self.cell_dir(cell))) for cell in sorted(set(cells))]

    def holder(self, cell: str) -> str | None:
        """Who runs or submits a cell now: "process 12 on host since 10:00:00"; None: nobody. Writes nothing."""
        try:
            with (self.cell_dir(cell) / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return (self.cell_dir(cell) / "lock").read_text().strip() or "another process"
        return None

    @contextmanager
    def submitting(self, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
        """Holds the store's lock of submissions: one process at a time looks at what its cells need and submits it.
        Yields the lock's descriptor. Waits for another holder; raises StoreError, naming it, after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with (self.root / "submitting").open("a+") as file:
            while not _locks(file):
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise StoreError(
                        f"{self.root} is being submitted from by {file.read().strip() or 'another process'} for "
                        f"{wait_s:.0f} s: wait for it, or end it."
                    )
                time.sleep(0.1)
            _sign(file)
            yield file.fileno()

    def now(self) -> float:
        """The time by the clock of the store's file system, which also dates its files: hosts' clocks differ."""
        probe = self.root / ".clock"
        probe.touch(mode=0o600)
        return probe.stat().st_mtime


def attempt_number(attempt: Path) -> int:
    """7 of attempt-007."""
    return int(attempt.name.partition("-")[2])


def is_measured(result: Mapping[str, Any]) -> bool:
    """Whether a result stands: not an ERROR, nor a NOT_RUN for another cell's failure."""
    error = result["error"]
    return result["verdict"] in FINISHED and (error is None or error["type"] != UPSTREAM)


@contextmanager
def _lock(folder: Path) -> Iterator[int]:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "lock"
    with path.open("a+") as file:
        if not _locks(file):
            file.seek(0)
            raise StoreError(
                f"Cell {folder.name[:12]} is being run by {file.read().strip() or 'another process'}: wait for it, "
                "or set another store=."
            )
        _sign(file)
        yield file.fileno()


def _locks(file: TextIO) -> bool:
    """Takes the lock of an open file, if nobody has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(file: TextIO) -> None:
    """Says in a locked file who holds it."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')}\n")
    file.flush()


def write_json(path: Path, data: Any, durable: bool = True) -> None:
    """Atomically: a reader sees the old file or the new one; when durable, also after a crash of the machine."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    with temporary.open("w") as file:
        json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def move_in(folder: Path, final: Path) -> None:
    """Renames a complete folder into place, in one step. Where another process was faster, its equal is kept."""
    final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(folder)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """None when the file is not there or was cut short."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
