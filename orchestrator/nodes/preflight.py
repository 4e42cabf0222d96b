"""What must hold before anything is started on this machine; every problem at once, each as a sentence."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from orchestrator.cell import Cell
from orchestrator.engine_env import EngineEnvironmentError, engine_problems
from orchestrator.failure import AttemptError
from orchestrator.gangs.launch import RAY_SCRIPT, STEP_SCRIPT, Allocation, ray_cluster, ray_launch
from orchestrator.staging import interpreter
from orchestrator.store import Store
from workloads.spec import Backend, Parallelism

MIN_FREE = 64 << 20  # bytes for logs and records; what a checkpoint takes is known to who writes it
RAY_CHECK_S = 60  # Ray tries for as long to reach a head that is gone
RANK_SIDE = ("torch", "numpy", "safetensors")  # what the ranks import


@dataclass(frozen=True)
class Place:
    """Where an attempt is about to run."""

    cell: Cell
    store: Store
    attempt: Path
    allocation: Allocation | None


def check(place: Place) -> None:
    """Raises AttemptError `preflight` with every problem."""
    checks: Sequence[Callable[[Place], Iterator[str]]] = (_disk, _python, _checkpoints, _nodes, _ray)
    problems = [problem for one in checks for problem in one(place)]
    if problems:
        raise AttemptError("preflight", " ".join(problems), node=socket.gethostname())


def _disk(place: Place) -> Iterator[str]:
    for folder in (place.attempt, place.store.references, place.store.checkpoints):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            yield f"{folder} cannot be written by user {os.getuid()}: change its owner or set another store=."
    free = shutil.disk_usage(place.attempt).free
    if free < MIN_FREE:
        yield (
            f"{place.attempt} has {free >> 20} MiB free, records need at least {MIN_FREE >> 20} MiB: make room or set "
            "another store=."
        )


def _python(place: Place) -> Iterator[str]:
    """Every arm's interpreter, once: what the ranks import, and the engine."""
    if place.cell["cluster"]["image"] is not None:
        return  # inside the container, where only a step can look
    found: dict[str, None] = {}  # a set in the order of the arms
    for name, arm in place.cell["code"].items():
        if arm is not None:
            found |= dict.fromkeys(_arm_python(place.cell, name, arm.get("environment")))
    yield from found


def _arm_python(cell: Cell, arm: str, environment: dict[str, str] | None) -> Iterator[str]:
    """Only looked for, not imported: that takes seconds, and the node parents do it next."""
    try:
        python = interpreter(cell, arm)
    except EngineEnvironmentError as error:
        yield f"On {socket.gethostname()}: {error}"
        return
    key = "backend.python" if environment is None else environment["name"]
    code = f"import importlib.util as u; print(*[m for m in {RANK_SIDE!r} if u.find_spec(m) is None])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        yield f"{key}={python} cannot be started: {error.strerror}."
        return
    if done.returncode != 0:
        yield f"{key}={python} fails: {done.stderr.strip()}"
        return
    if done.stdout.strip():
        names = ", ".join(done.stdout.split())
        yield f"{key}={python} has no {names}: install them there, or name another interpreter."
    if environment is not None:
        yield from engine_problems(python, cell["backend"]["engine"], environment["name"])
    elif cell["backend"].get("url") is None:  # else a server has the engine
        yield from engine_problems(python, cell["backend"]["engine"], None)


def _checkpoints(place: Place) -> Iterator[str]:
    for name, checkpoint in place.cell["checkpoints"].items():
        path = checkpoint["path"]
        if path is not None and not any(Path(path).glob("*.safetensors")):
            yield (
                f"checkpoints.{name}.path={path} holds no .safetensors file as seen from {socket.gethostname()}: give "
                "a folder that all nodes see."
            )


def _nodes(place: Place) -> Iterator[str]:
    wanted, allocation = place.cell["parallelism"]["nodes"], place.allocation
    if place.cell["cluster"]["kind"] != "slurm":
        return
    if allocation is None:
        yield "cluster.kind is slurm, but this process is in no Slurm job: submit the cell instead of running it here."
        return
    if len(allocation.hosts) < wanted:
        yield f"The layout needs {wanted} nodes, job {allocation.job} has {len(allocation.hosts)}."
    for tool in ("srun", "scancel"):
        if shutil.which(tool) is None:
            yield f"{tool} is not on the PATH of {socket.gethostname()}."
    if not STEP_SCRIPT.is_file():
        yield f"{STEP_SCRIPT} is missing: run the driver from a checkout, where slurm/ lies beside orchestrator/."
    for host in allocation.hosts:
        try:
            socket.gethostbyname(host)
        except OSError:
            yield f"The name of node {host} does not resolve on {socket.gethostname()}."


def _ray(place: Place) -> Iterator[str]:
    """Connects as a launch would, in a process of its own: that of a driver stays free of Ray."""
    ray = ray_cluster(place.cell["cluster"])
    if ray is None:
        return
    if find_spec("ray") is None:
        yield f"{sys.executable} has no ray: install it there with the version of the cluster, `pip install ray`."
        return
    if ray.address is None:
        if not RAY_SCRIPT.is_file():
            yield f"{RAY_SCRIPT} is missing: run the driver from a checkout, where slurm/ lies beside orchestrator/."
        return
    layout, backend = Parallelism(**place.cell["parallelism"]), Backend(**place.cell["backend"])
    command = ray_launch(ray, layout, backend, "--check")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RAY_CHECK_S)
    except subprocess.TimeoutExpired:
        yield f"The Ray cluster at {ray.address} did not answer within {RAY_CHECK_S} s: is its head still there?"
        return
    if done.returncode != 0:
        events = [line for line in done.stdout.splitlines() if line.startswith("{")]
        yield (
            json.loads(events[-1])["message"]
            if events
            else f"{shlex.join(command)} fails: {done.stderr.strip()}"
        )
