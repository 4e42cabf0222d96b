"""Says how a set of gangs is started: one command for this machine, or one `srun` step over the allocation."""

import json
import os
import random
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.cluster.slurm import inherited_names
from orchestrator.failure import AttemptError
from orchestrator.gangs.known_fields import told
from workloads.spec import Backend, GangSpec, Parallelism
from workloads.stacks import TOOL, find_tool

STEP_SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "step.sh"
RAY_SCRIPT = STEP_SCRIPT.with_name("ray_step.sh")
RAY_LAUNCH = Path(__file__).with_name("ray_launch.py")
PORTS = range(20_000, 32_000)  # below the kernel's ephemeral ports, so that no outgoing connection takes one


@dataclass(frozen=True)
class Allocation:
    """The Slurm job that the driver runs in. hosts: its nodes in order, the driver's own first."""

    job: str
    hosts: Sequence[str]


@dataclass(frozen=True)
class RayCluster:
    """Whose actors the node parents are. address: HOST:PORT or `auto`; None: it is started in the step itself.
    wait_s: for other jobs to make room, and for nodes to join what is being started."""

    address: str | None
    wait_s: float


@dataclass(frozen=True)
class GangSet:
    """Gangs that run one after the other in the same node parents, on the same source tree."""

    folder: Path
    gangs: Sequence[GangSpec]
    tree: Path  # the workloads/ and collectors/ below it run
    parents: int = 1  # node parents: one on this machine, one a node on a cluster
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None  # pyxis container of the ranks
    mounts: Sequence[str] = ()
    ray: RayCluster | None = None  # whose nodes they are
    program: Sequence[str] = ("workloads.node",)  # module that each node runs, and its options
    survivors_s: int = 0  # how long other nodes go on after one has ended; 0: they end with one that failed
    stays: bool = False  # whether its nodes wait for another set after it

    def write(self) -> None:
        """`gangs.json` and each gang's `gang.json`."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = []
        for spec in self.gangs:
            Path(spec.output).mkdir(mode=0o700, parents=True, exist_ok=True)
            files.append(Path(spec.output) / "gang.json")
            files[-1].write_text(json.dumps(told(spec, self.tree), indent=1) + "\n")
        (self.folder / "gangs.json").write_text(json.dumps([str(file) for file in files]) + "\n")


def find_allocation(variables: Mapping[str, str]) -> Allocation | None:
    """The job whose batch step has these variables; None outside of a job."""
    if "SLURM_JOB_ID" not in variables:
        return None
    command = ["scontrol", "show", "hostnames", variables["SLURM_JOB_NODELIST"]]
    hosts = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()
    return Allocation(variables["SLURM_JOB_ID"], hosts)


def ray_cluster(cluster: Mapping[str, Any]) -> RayCluster | None:
    """Of a cell's `cluster`."""
    ray = cluster.get("ray", {})  # cells from before there was any have none
    if cluster["kind"] == "ray":
        return RayCluster(ray["address"], ray["wait_s"])
    return RayCluster(None, ray["wait_s"]) if ray.get("start") else None


def free_port() -> int:
    """A port that nothing on this machine uses. Rank 0 of a gang listens on it."""
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AttemptError(
        "preflight", f"200 ports of {PORTS} were tried on {socket.gethostname()}: all are in use."
    )


def master_address(allocation: Allocation | None) -> str:
    return "127.0.0.1" if allocation is None else allocation.hosts[0]


def environment(gang_set: GangSet, allocation: Allocation | None) -> dict[str, str]:
    """Variables of the node parents and their ranks: the driver's without the scheduler's, then our own."""
    removed = set(inherited_names(os.environ))
    variables = {name: value for name, value in os.environ.items() if name not in removed}
    own, package = str(gang_set.tree), gang_set.gangs[0].package_dir
    paths = [path for path in (own, package, variables.get("PYTHONPATH")) if path]
    variables |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if (tool := find_tool()) is not None:
        variables[TOOL] = tool
    backend = gang_set.gangs[0].backend
    if backend.device == "cpu" and backend.engine != "vllm":  # which shares the cores out itself
        variables["OMP_NUM_THREADS"] = (
            "1"  # the ranks of a node share its cores; threads do not survive a fork
        )
    if gang_set.ray is None and _on_one_machine(allocation):  # else the launcher knows where the nodes are
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if gang_set.ray is not None and gang_set.ray.address is None:
        # Else whoever reaches a node of the job could run code there as its user.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**variables, **gang_set.environment}


def _on_one_machine(allocation: Allocation | None) -> bool:
    """Also true for a cluster whose nodes all live behind loopback addresses."""
    if allocation is None:
        return True
    return all(socket.gethostbyname(host).startswith("127.") for host in allocation.hosts)


def launch_command(gang_set: GangSet, allocation: Allocation | None) -> list[str]:
    layout, backend = gang_set.gangs[0].parallelism, gang_set.gangs[0].backend
    node = [gang_set.python, "-m", *gang_set.program, str(gang_set.folder), "--attended"]
    if gang_set.ray is not None:
        node = ray_launch(gang_set.ray, layout, backend, "--set", str(gang_set.folder), "--", *node)
    elif allocation is None:
        node += ["--node-rank", "0", "--ranks", f"0:{layout.ranks}", "--parent", str(os.getpid())]
    if allocation is None:
        return node
    if len(allocation.hosts) < layout.nodes:
        raise AttemptError(
            "launch_failed",
            f"The layout needs {layout.nodes} nodes, job {allocation.job} has {len(allocation.hosts)}: "
            f"{', '.join(allocation.hosts)}. Submit it with --nodes={layout.nodes}.",
        )
    gpus = layout.gpus_per_node if backend.device == "cuda" else 0
    script = [str(STEP_SCRIPT), str(layout.gpus_per_node)]
    if gang_set.ray is not None:
        script = [str(RAY_SCRIPT), str(layout.gpus_per_node), str(gpus)]
    return [*_srun(gang_set, allocation), "bash", *script, *node]


def ray_launch(ray: RayCluster, parallelism: Parallelism, backend: Backend, *arguments: str) -> list[str]:
    """Runs by its path: the arm's tree, first on the path of modules, may hold another version of it."""
    options = [
        f"--nodes={parallelism.nodes}",
        f"--ranks={parallelism.gpus_per_node}",
        f"--wait={ray.wait_s:g}",
    ]
    options.append("--growing" if ray.address is None else f"--address={ray.address}")
    # vLLM's own executor takes the GPUs of the cluster itself, by the address that the node parents get.
    if backend.device == "cuda" and backend.options.get("distributed_executor_backend") != "ray":
        options.append("--gpus")
    return [sys.executable, "-P", str(RAY_LAUNCH), *options, *arguments]


def _srun(gang_set: GangSet, allocation: Allocation) -> list[str]:
    """Everything explicit: defaults of a step depend on options of the job, and on the release of Slurm."""
    nodes = gang_set.gangs[0].parallelism.nodes
    options = {
        "jobid": allocation.job,
        "nodes": nodes,
        "ntasks": nodes,
        "ntasks-per-node": 1,
        "nodelist": ",".join(allocation.hosts[:nodes]),
        "cpu-bind": "none",  # one task a node, whose ranks use all cores of it
        "kill-on-bad-exit": int(gang_set.survivors_s == 0),
        "wait": gang_set.survivors_s,
        "error": gang_set.folder / "node-%n.log",
        "chdir": gang_set.tree,
    }
    if gang_set.survivors_s:
        del options["error"]  # a node that does not see the folder has to start all the same, and say so
    if gang_set.gangs[0].backend.device == "cuda":
        options["gpus-per-node"] = gang_set.gangs[0].parallelism.gpus_per_node
    if gang_set.image is not None:
        here = [f"{path}:{path}" for path in (gang_set.tree, gang_set.folder, STEP_SCRIPT.parent)]
        options |= {
            "container-image": gang_set.image,
            "container-mounts": ",".join([*here, *gang_set.mounts]),
        }
    return ["srun", *(f"--{name}={value}" for name, value in options.items())]
