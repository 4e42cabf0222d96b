"""The batch script of an array of attempts: submitit's own template with our parameters, the same in a plan and in a
job."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from orchestrator.cell import Cell, canonical
from orchestrator.cluster.jobs import CODE, COMMENT, TASKS
from orchestrator.config.text import seconds

GRACE_S = 120  # before the time limit, for the driver to stop its gangs and write a typed result


def shape(cell: Cell) -> bytes:
    """Equal for cells that can be tasks of one array: all that the script says of a cell."""
    kept = [cell["cluster"][key] for key in ("exclude", "setup", "max_jobs", "array_limit")]
    return canonical([_parameters(cell), _command(cell), kept])


def script(
    cell: Cell, folder: Path, tasks: int, exclude: Sequence[str] = (), after: Sequence[str] = ()
) -> str:
    """What sbatch is given for the batch in `folder`, whose tasks all have the shape of `cell`.

    exclude: nodes besides the cell's own. after: ids of jobs that must have ended first, whichever way.
    The driver runs in the batch step (`use_srun=False`) and starts steps of its own: one task a node, which forks
    that node's ranks. Requeueing is off since a failed attempt is classified and retried as a fresh job.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    known = _parameters(cell)
    known["additional_parameters"] = dict(known["additional_parameters"])
    unwanted = ",".join(filter(None, (cell["cluster"]["exclude"], *exclude)))
    if unwanted:
        known["exclude"] = unwanted
    if after:
        known["dependency"] = f"afterany:{':'.join(after)}"
    text: str = _make_sbatch_string(
        command=_command(cell),
        folder=folder,
        comment=COMMENT + folder.name,
        map_count=tasks,
        array_parallelism=cell["cluster"]["max_jobs"] or tasks,
        setup=_setup(cell["cluster"], folder),
        **known,
    )
    return text


def _parameters(cell: Cell) -> dict[str, Any]:
    """Keyword arguments of submitit's template that do not depend on the batch."""
    cluster, layout = cell["cluster"], cell["parallelism"]
    names = ("partition", "account", "qos", "nodelist", "constraint")
    chosen = {name: cluster[name] for name in names if cluster[name] is not None}
    if cell["backend"]["device"] == "cuda":
        chosen["gpus_per_node"] = layout["gpus_per_node"]
    if cluster["exclusive"]:
        chosen |= {"exclusive": True, "mem": "0"}  # 0: all memory of the nodes
    return {
        **chosen,
        "job_name": cell["experiment"],
        "nodes": layout["nodes"],
        "ntasks_per_node": 1,
        "time": ceil(seconds(cluster["time"]) / 60),
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,  # submitit's own would be refused where such keys are checked
        "additional_parameters": _additional(cluster, layout),
    }


def _command(cell: Cell) -> str:
    """`exec`, so that the batch step's signals reach the driver and its exit code is the job's. `-P`, since the job
    starts where somebody submitted it, which may be a checkout that has changed."""
    python = cell["cluster"]["python"] or sys.executable
    return f'exec {shlex.join([python, "-u", "-P", "-m", "orchestrator.driver"])} "$attempt"'


def _setup(cluster: Mapping[str, Any], folder: Path) -> list[str]:
    path = shlex.quote(str(folder / CODE))
    return [
        "set -euo pipefail",  # a failing line must end the job, not run it in another environment
        f"mapfile -t attempts <{shlex.quote(str(folder / TASKS))}",
        "attempt=${attempts[$SLURM_ARRAY_TASK_ID]}",
        f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}",
        *cluster["setup"],
    ]


def _additional(cluster: Mapping[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "no-requeue": True,
        "kill-on-invalid-dep": "yes",  # else a job whose dependency can never hold pends for ever
        "signal": f"B:TERM@{GRACE_S}",
    }
    if cluster["segment"]:
        extra["segment"] = segment_nodes(layout)
    return extra


def segment_nodes(layout: Mapping[str, int]) -> int:
    """Nodes that must share an NVLink domain: those of one EP group."""
    return max(1, layout["ep"] // layout["gpus_per_node"])
