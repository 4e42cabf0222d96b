"""Which code a cell runs and where, as the lines of a plan."""

from collections.abc import Iterator
from typing import Any

from orchestrator.cell import Cell
from orchestrator.gangs.launch import ray_cluster, ray_launch
from orchestrator.provenance import checkout
from workloads.spec import Backend, Parallelism


def code_lines(cell: Cell) -> Iterator[str]:
    """Nothing where the only arm is this checkout as it lies."""
    arms = {name: arm for name, arm in cell["code"].items() if arm is not None}
    if len(arms) > 1 or any(_is_told(arm) for arm in arms.values()):
        for name, arm in arms.items():
            yield f"  {name} runs {_code(arm)}"


def _is_told(arm: dict[str, Any]) -> bool:
    return arm["path"] != str(checkout()) or arm["commit"] is not None or "overlay" in arm


def _code(arm: dict[str, Any]) -> str:
    commit = f" at {arm['commit'][:12]}" if arm["commit"] is not None else ""
    environment = f", the engine of {arm['environment']['name']}" if arm.get("environment") else ""
    laid = [f"{one['file']} over {one['at']}" for one in arm.get("overlay", [])]
    faults = [f"fault {fault}" for fault in arm["faults"]]
    return ", ".join([f"{arm['path']}{commit}{environment}", *laid, *faults])


def where_lines(cell: Cell) -> Iterator[str]:
    cluster = cell["cluster"]
    if cluster["kind"] == "local":
        yield "  runs as processes of this machine"
    yield from _ray_lines(cell)
    if cluster["image"] is not None:
        yield f"  ranks run in the container {cluster['image']}, by srun --container-image"
        yield from (f"    mounts {mount}" for mount in cluster["mounts"])
    yield from (f"  ranks get {name}={value}" for name, value in cluster["env"].items())


def _ray_lines(cell: Cell) -> Iterator[str]:
    """Where the actors of a cell's gangs are, and what each node keeps for them."""
    ray = ray_cluster(cell["cluster"])
    if ray is None:
        return
    of = "a Ray cluster of its own in the job" if ray.address is None else f"the Ray cluster at {ray.address}"
    layout = Parallelism(**cell["parallelism"])
    command = ray_launch(ray, layout, Backend(**cell["backend"]))
    kept = f"CPUs 1, GPUs {layout.gpus_per_node}" if "--gpus" in command else f"CPUs {layout.gpus_per_node}"
    yield f"  gangs are actors in {of}: nodes {layout.nodes}, of each {kept}, waited for up to {ray.wait_s:g} s"
