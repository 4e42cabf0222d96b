"""The batch script of one attempt: submitit's own template with our parameters, the same in a plan and in a job."""

import shlex
import sys
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from orchestrator.plan import Cell
from orchestrator.provenance import checkout
from orchestrator.text import seconds

GRACE_S = 120  # before the time limit, for the driver to stop its gangs and write a typed result
LOG_FOLDER = "slurm"  # of an attempt: the script and the driver's output


def parameters(cell: Cell, cell_id: str) -> dict[str, Any]:
    """Keyword arguments of submitit's Slurm executor.

    The driver runs in the batch step (`use_srun=False`) and starts steps of its own: one task a node, which forks
    that node's ranks. Requeueing is off since a failed attempt is classified and retried as a fresh job.
    """
    cluster, layout = cell["cluster"], cell["parallelism"]
    names = ("partition", "account", "qos", "nodelist", "exclude", "constraint")
    chosen = {name: cluster[name] for name in names if cluster[name] is not None}
    if cell["backend"]["device"] == "cuda":
        chosen["gpus_per_node"] = layout["gpus_per_node"]
    if cluster["exclusive"]:
        chosen |= {"exclusive": True, "mem": "0"}  # 0: all memory of the nodes
    return {
        **chosen,
        "job_name": cell["experiment"],
        "comment": cell_id,
        "nodes": layout["nodes"],
        "ntasks_per_node": 1,
        "time": ceil(seconds(cluster["time"]) / 60),
        "setup": _setup(cluster),
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,  # submitit's own would be refused where such keys are checked
        "additional_parameters": _additional(cluster, layout),
    }


def driver_command(cell: Cell, attempt: Path) -> str:
    """`exec`, so that the batch step's signals reach the driver and its exit code is the job's."""
    python = cell["cluster"]["python"] or sys.executable
    return f"exec {shlex.join([python, '-u', '-m', 'orchestrator.driver', str(attempt)])}"


def script(cell: Cell, cell_id: str, attempt: Path) -> str:
    """The text that `submit` hands to sbatch for this attempt."""
    from submitit.slurm.slurm import _make_sbatch_string

    text: str = _make_sbatch_string(
        command=driver_command(cell, attempt), folder=attempt / LOG_FOLDER, **parameters(cell, cell_id)
    )
    return text


def _setup(cluster: Mapping[str, Any]) -> list[str]:
    path = shlex.quote(str(checkout()))
    return [
        "set -euo pipefail",  # a failing line must end the job, not run it in another environment
        f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}",
        *cluster["setup"],
    ]


def _additional(cluster: Mapping[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
    extra: dict[str, Any] = {"no-requeue": True, "signal": f"B:TERM@{GRACE_S}"}
    if cluster["segment"]:
        extra["segment"] = segment_nodes(layout)
    return extra


def segment_nodes(layout: Mapping[str, int]) -> int:
    """Nodes that must share an NVLink domain: those of one EP group."""
    return max(1, layout["ep"] // layout["gpus_per_node"])
