"""Holds a cell back whose references another cell was to make and did not."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.cluster.jobs import JOB
from orchestrator.failure import AttemptError, Failure
from orchestrator.store import UPSTREAM, Store, read_json


def check(store: Store, attempt: Path, patience_s: float) -> None:
    """Raises AttemptError `upstream` where a reference is not there that another attempt was to make. One without a
    result may have ended a moment ago on another node: its files are waited for `patience_s`."""
    record = read_json(attempt / JOB)
    deadline = time.monotonic() + patience_s
    for need in record["needs"] if record is not None else ():
        maker = store.cell_dir(need["cell"]) / need["attempt"]
        while not store.holds(need["reference"]):
            result = store.result(maker)
            failed = result is not None and result["error"] is not None
            if failed or time.monotonic() >= deadline:
                raise AttemptError(UPSTREAM, cause(need["reference"], maker, result).message)
            time.sleep(min(1.0, patience_s))


def cause(reference: str, maker: Path, result: Mapping[str, Any] | None) -> Failure:
    """The failure of a cell that waited for `maker`, whose result is `result`."""
    if result is None:
        how = "left no result"
    elif result["error"] is not None:
        how = f"ended with {result['verdict']} {result['error']['type']}: {result['error']['message']}"
    else:
        how = f"ended with {result['verdict']} and left no whole records of it"
    message = f"Reference {reference[:12]} was to come from cell {maker.parent.name[:12]}, {maker.name}, which {how}"
    return Failure(UPSTREAM, message)
