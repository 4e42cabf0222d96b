"""The mark that an operator leaves in an attempt before it is told to end, and the type that its end has for that.

cancel.json: {user, host, process, time} of the operator; time: seconds of the Unix clock. Who ends an attempt without
this mark, be it Slurm or another person, leaves the type `stopped`.
"""

import getpass
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from orchestrator.cell import Cell
from orchestrator.failure import Failure
from orchestrator.result import unjudged
from orchestrator.store import RESULT, UPSTREAM, read_json, write_json

MARK = "cancel.json"
CANCELLED = "cancelled"  # failure type; it has no budget, so nobody but `resume` runs the cell again
_OF_THE_CELL = {"unsupported", UPSTREAM}  # failures that say why a cell is not run, whoever ends it


def mark(attempt: Path) -> None:
    """Before the attempt's job or driver is told to end."""
    record = {
        "user": getpass.getuser(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": time.time(),
    }
    write_json(attempt / MARK, record)


def is_marked(attempt: Path) -> bool:
    return (attempt / MARK).exists()


def explained(attempt: Path, failure: Failure) -> Failure:
    """The failure of an attempt that has ended: `cancelled` where an operator had cancelled it. What died of that may
    say something else first, such as a rank that got the signal before the driver did."""
    record = read_json(attempt / MARK)
    if record is None or failure.type in _OF_THE_CELL:
        return failure
    message = f"{_sentence(record)} ({failure.type}: {failure.message})"
    return replace(failure, type=CANCELLED, message=message, node=None)


def never_started(cell: Cell, attempt: Path) -> None:
    """Writes the result of a marked attempt that no driver has claimed, nor can any more."""
    failure = Failure(CANCELLED, f"{_sentence(read_json(attempt / MARK))} It had not begun.")
    write_json(attempt / RESULT, unjudged(cell, attempt.parent.name, attempt.name, "ERROR", failure))


def _sentence(record: dict[str, str | float]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(record["time"])))
    return f"Cancelled by {record['user']} on {record['host']} at {when}."
