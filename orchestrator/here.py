"""Runs cells on this machine: one attempt at a time, in a driver process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from orchestrator import provenance
from orchestrator.cluster import cancelled
from orchestrator.cluster.attempts import DONE, FAILED
from orchestrator.cluster.history import Experiment, read_history, stands
from orchestrator.cluster.jobs import Book
from orchestrator.failure import Failure
from orchestrator.result import unjudged
from orchestrator.store import RESULT, Store, write_json

DRIVER_STOP_S = 60  # for a driver to stop its gangs and write its result


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def run_here(store: Store, experiment: Experiment, name: str) -> bool:
    """One attempt at a cell, whose driver has the terminal; it always leaves a result. False: none was made, since the
    cell has got a result that stands meanwhile, of another operator or of one who cancelled it."""
    cell = experiment.cells[name]
    with store.locked(name) as locks:
        history = read_history(store, Book(store), name, experiment.before[name])
        if stands(store, experiment, name, history) in (DONE, FAILED):
            return False
        store.write_cell(cell)
        attempt = store.new_attempt(name)
        write_json(attempt / "provenance.json", provenance.collect())
        code = _drive(attempt, locks)
        if store.result(attempt) is None:
            how = (
                f"was ended by signal {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
            failure = Failure("lost", f"The driver {how} and left no {RESULT}; see {attempt / 'driver.log'}.")
            failure = cancelled.explained(attempt, failure)
            write_json(attempt / RESULT, unjudged(cell, name, attempt.name, "ERROR", failure))
        return True


def _drive(attempt: Path, locks: Sequence[int]) -> int:
    """Exit code of `orchestrator.driver`. It inherits the cell's lock, so that the lock lasts as long as it runs."""
    paths = [str(provenance.checkout()), *filter(None, [os.environ.get("PYTHONPATH")])]
    driver = subprocess.Popen(
        [sys.executable, "-u", "-m", "orchestrator.driver", str(attempt)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        pass_fds=locks,
    )
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return driver.wait()
    except KeyboardInterrupt:
        driver.terminate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        try:
            driver.wait(DRIVER_STOP_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
