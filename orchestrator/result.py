"""A result.json for an attempt that could not be judged: the shape is the judge's, the verdict ERROR or NOT_RUN."""

from dataclasses import asdict
from typing import Any

from orchestrator.cell import Cell
from orchestrator.failure import Failure


def unjudged(cell: Cell, cell_id: str, attempt: str, verdict: str, failure: Failure) -> dict[str, Any]:
    """attempt: name of its folder; "" where a cell was never tried."""
    return {
        "cell": cell_id,
        "attempt": attempt,
        "verdict": verdict,
        "checks": [],
        "findings": [],
        "coverage": {"fraction": 0.0, "bytes": 0, "expected": 0, "vacuous": 0, "unclassified": 0},
        "labels": dict(cell["labels"]),
        "layout": dict(cell["parallelism"]),
        "seconds": 0.0,
        "starts": 0,
        "references": [],
        "error": asdict(failure),
        "evidence": {"loads": [], "audits": [], "memory": [], "differing": []},
    }
