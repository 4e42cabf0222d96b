"""Stands in for the interpreter of a driver: the real driver, whose measuring is replaced by what a file tells it.

`<store>/toy/<cell id>` holds a JSON list, one word for each attempt, the last one for all later ones:
pass, check (its nodes, and then pass), fail, raise, die, hold (until told to stop), deaf (hold, but it leaves no
result then), or TYPE@NODE for a failure of that type; `pass:go` and `die:go` wait for the file `<store>/toy/go`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator import driver
from orchestrator.cell import Cell, references
from orchestrator.cluster import upstream
from orchestrator.failure import AttemptError, Failure
from orchestrator.gangs.launch import find_allocation
from orchestrator.nodes import node_step
from orchestrator.result import unjudged
from orchestrator.store import Store


def measure(cell: Cell, store: Store, attempt: Path, recorder: Any) -> dict[str, Any]:
    upstream.check(store, attempt, float(cell["cluster"]["lost_after_s"]))
    with (store.root / "toy" / "ran").open("a") as file:
        file.write(f"{attempt.parent.name}/{attempt.name} {os.environ['SLURM_JOB_NODELIST']}\n")
    orders = store.root / "toy" / attempt.parent.name
    words = json.loads(orders.read_text()) if orders.exists() else ["pass"]
    word, _, value = words[min(int(attempt.name[-3:]), len(words)) - 1].partition(":")
    if word == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if word in ("hold", "deaf"):
        time.sleep(600)
    while value == "go" and not (store.root / "toy" / "go").exists():
        time.sleep(0.1)
    if word == "check":
        nodes = node_step.check_nodes(cell, store, attempt, find_allocation(os.environ), recorder)
        assert nodes is not None
        nodes.close()
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "raise":
        raise AttemptError("rank_failed", "The program has a defect.")
    if "@" in word:
        kind, _, node = word.partition("@")
        raise AttemptError(kind, f"{kind} was ordered.", node=node or None)
    for reference in references(cell):
        (store.references / reference.key).mkdir(exist_ok=True)
    verdict = "FAIL" if word == "fail" else "PASS"
    result = unjudged(cell, attempt.parent.name, attempt.name, verdict, Failure("", ""))
    return {**result, "error": None}


if __name__ == "__main__":
    driver.measure = measure
    sys.exit(driver.main(sys.argv[5:]))  # after -u -P -m orchestrator.driver
