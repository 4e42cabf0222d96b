"""Decides from the results of a cell's attempts whether it is done, runs again, or has failed for good. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.store import UPSTREAM, is_measured

Json = Mapping[str, Any]

NEW, DONE, AGAIN, FAILED, WAITS = "new", "done", "again", "failed", "waits"
# Failure types of the code under test and of ours: the same cell fails so again, on whichever machine.
DEFECTS = {"rank_failed", "checkpoint", "unusable", "code", "judge", "driver"}
HANG = (
    "hang"  # of a node, of the network or of the program: one that comes back on other nodes is the program's
)


def standing(policy: Json, results: Sequence[Json]) -> str:
    """policy: of the cell. results: of its ended attempts in one experiment, oldest first.

    `new`: none yet; `done`: measured, or it cannot be measured; `again`: its failure is the cluster's and within the
    budget of its type; `waits`: for a cell that makes what it needs; `failed`: none of these.
    """
    if not results:
        return NEW
    last = results[-1]
    if is_measured(last):
        return DONE
    kind = failure_type(last)
    if kind == UPSTREAM:
        return WAITS
    tried = [failure_type(result) for result in results if failure_type(result) != UPSTREAM]
    budget = policy["retries"].get(kind, 0)
    return AGAIN if tried.count(kind) <= budget and len(tried) < policy["max_attempts"] else FAILED


def is_defect(results: Sequence[Json]) -> bool:
    """Whether the last attempt failed by the program, so that another one would, too. results: as for `standing`."""
    kinds = [failure_type(result) for result in results]
    return kinds[-1] in DEFECTS or (kinds[-1] == HANG and kinds.count(HANG) > 1)


def failure_type(result: Json) -> str:
    """ "" of a result without a failure."""
    return str(result["error"]["type"]) if result["error"] is not None else ""
