"""Turns one attempt's records into result.json, and the results of cells into verdict.json."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from orchestrator.judge.arm import ArmJudge
from orchestrator.judge.attempt import CRASH, Attempt, open_attempt
from orchestrator.judge.findings import Ledger
from orchestrator.judge.versions import versions

Json = dict[str, Any]

#: A verdict of several is the first of these that occurs.
_SEVERITY = ("FAIL", "ERROR", "INCONCLUSIVE", "NOT_RUN", "PASS")
_EXIT_CODES = {"PASS": 0, "FAIL": 1, "ERROR": 3, "INCONCLUSIVE": 4, "NOT_RUN": 4}


def judge_attempt(cell: Mapping[str, Any], attempt_dir: Path, references: Mapping[str, Path]) -> Json:
    """Content of result.json for one attempt.

    references: gang folders of fresh starts, `fresh.new` for the candidate, `base/fresh.new` for the base arm.
    """
    attempt = open_attempt(cell, attempt_dir, references)
    ledger = Ledger(list(attempt.moments))
    arms = [ArmJudge(attempt, arm, ledger) for arm in attempt.arms]
    checks = [check for arm in arms for check in arm.checks()] + _base_crash(attempt)
    walls = [arm.wall for arm in arms if arm.wall]
    parallelism = cell["parallelism"]
    return {
        "cell": attempt_dir.parent.name,
        "attempt": attempt_dir.name,
        "verdict": cell_verdict(checks),
        "checks": checks,
        "findings": ledger.findings(),
        "coverage": arms[0].coverage(),
        "labels": dict(cell["labels"]),
        "layout": dict(parallelism),
        "seconds": max(end for _, end in walls) - min(start for start, _ in walls) if walls else 0.0,
        "starts": sum(load["do"] == "start" for arm in arms for load in arm.loads),
        "versions": versions(cell["code"], {arm.name: arm.engine for arm in arms}),
        "references": sorted({path.name for path in references.values()}),
        "error": arms[0].error(),
        "evidence": {
            "loads": [load for arm in arms for load in arm.loads],
            "audits": [entry for arm in arms for entry in arm.audits],
            "memory": [entry for arm in arms for entry in arm.memory],
            "differing": [entry for arm in arms for entry in arm.differing()],
        },
    }


def _base_crash(attempt: Attempt) -> list[Json]:
    """How the base arm died, as a check of it that no verdict depends on; empty when it did not."""
    path = attempt.folder / "base" / CRASH
    if not path.exists():
        return []
    failure = orjson.loads(path.read_bytes())
    return [
        {
            "name": "base/crash",
            "arm": "base",
            "rule": "gate",
            "verdict": "ERROR",
            "required": False,
            "expected": "the scenario runs to its end",
            "observed": failure["message"],
            "caveat": "",
            "counts": {"rank": failure["rank"]},
        }
    ]


def cell_verdict(checks: Sequence[Mapping[str, Any]]) -> str:
    """Verdict of the required checks. Broken records come before any FAIL, since they decide nothing, and a
    cell without a required check that passed is never PASS."""
    required = [check for check in checks if check["required"]]
    if any(check["rule"] == "gate" and check["verdict"] == "ERROR" for check in required):
        return "ERROR"
    if not any(check["rule"] != "gate" for check in required):
        return "INCONCLUSIVE"
    return worst(check["verdict"] for check in required)


def worst(verdicts: Any) -> str:
    """The most severe of some verdicts; NOT_RUN of none."""
    present = set(verdicts)
    return next((verdict for verdict in _SEVERITY if verdict in present), "NOT_RUN")


def combine(results: Sequence[Mapping[str, Any]], experiment: str = "") -> Json:
    """Content of verdict.json. Of several attempts at one cell the last one counts."""
    attempts = Counter(result["cell"] for result in results)
    last: dict[str, Mapping[str, Any]] = {}
    for result in sorted(results, key=lambda r: str(r["attempt"])):
        last[result["cell"]] = result
    order = {cell: place for place, cell in enumerate(attempts)}
    cells = [
        {"id": cell, **{k: v for k, v in result.items() if k != "cell"}, "attempts": attempts[cell]}
        for cell, result in sorted(last.items(), key=lambda item: order[item[0]])
    ]
    verdict = worst(cell["verdict"] for cell in cells)
    return {
        "experiment": experiment,
        "verdict": verdict,
        "exit_code": _EXIT_CODES[verdict],
        "counts": dict(Counter(cell["verdict"] for cell in cells)),
        "cells": cells,
    }
