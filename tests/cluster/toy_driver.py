"""What a driver does with one set of gangs, without a cell: `toy_driver.py FOLDER VIA TIMEOUT`, outcome as JSON.

TIMEOUT: seconds for which a rank may be silent in the step that does VIA. A fourth word: two nodes of two ranks, on
the Ray cluster at this address, or for `ray` on one that the step starts.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from orchestrator.failure import AttemptError
from orchestrator.gangs.gang import run
from orchestrator.gangs.launch import GangSet, RayCluster, find_allocation, free_port, master_address
from orchestrator.gangs.signs import Limits
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step

ROOT = Path(__file__).parents[2]


def main() -> None:
    folder, via, timeout_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    limits = Limits(60, {"update": timeout_s})
    ray = None
    if len(sys.argv) > 4:
        ray = RayCluster(None if sys.argv[4] == "ray" else sys.argv[4], wait_s=120)
    wide = Parallelism(tp=4, dp=4, ep=16, nodes=4, gpus_per_node=4)
    layout = wide if ray is None else Parallelism(tp=4, nodes=2, gpus_per_node=2)
    allocation = find_allocation(os.environ)
    spec = GangSpec(
        name="candidate",
        output=str(folder / "candidate"),
        model=Model(),
        parallelism=layout,
        backend=Backend(engine="toy_engine:ToyEngine"),
        checkpoints={},
        checkpoint_dirs={},
        steps=[Step("start", "old", "sum"), Step("update", "new", via)],
        master_addr=master_address(allocation),
        master_port=free_port(),
    )
    toy = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'native'}"}
    events: list[dict] = []
    error = None
    try:
        gangs = GangSet(folder / "set", [spec], ROOT, parents=layout.nodes, environment=toy, ray=ray)
        run(gangs, allocation, limits, lambda e: events.append(dict(e)))
    except AttemptError as caught:
        error = asdict(caught.failure)
    (folder / "outcome.json").write_text(json.dumps({"error": error, "events": events}))


if __name__ == "__main__":
    main()
