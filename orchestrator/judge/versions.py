"""Says which two versions an attempt compares, so that a report can name them."""

from collections.abc import Callable, Mapping
from typing import Any

Json = Mapping[str, Any]


def versions(code: Json, engines: Mapping[str, str]) -> dict[str, str]:
    """By arm, what tells it from the other one; empty where only one arm runs.

    code: of a cell. engines: name and release of the foreign engine as it was met in each arm, where there is one.
    """
    arms = {name: code[name] for name in ("base", "candidate") if code.get(name) is not None}
    if len(arms) < 2:
        return {}
    told = {name: {"engine": engines.get(name, ""), **_facts(arm)} for name, arm in arms.items()}
    base, candidate = told["base"], told["candidate"]
    keys = [key for key in base if base[key] != candidate[key]]
    return {
        name: ", ".join(facts[key] for key in keys if facts[key]) or "the same code"
        for name, facts in told.items()
    }


def _facts(arm: Json) -> dict[str, str]:
    return {key: say(arm.get(key)) for key, say in _SAYS.items()}


_SAYS: dict[str, Callable[[Any], str]] = {
    "path": str,
    "commit": lambda commit: f"commit {commit[:12]}" if commit else "files as they lie",
    "environment": lambda environment: f"environment {environment['name']}" if environment else "",
    "overlay": lambda laid: (
        ", ".join(f"{one['file']} over {one['at']}" for one in laid or ()) or "no overlay"
    ),
    "faults": lambda faults: ", ".join(f"fault {fault}" for fault in faults or ()) or "no fault",
}
