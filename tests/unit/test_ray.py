"""What a config may say of Ray, the command that puts gangs there, and what a plan and the preflight say of it."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.config.compose import compose
from orchestrator.config.planning import plan
from orchestrator.config.schema import RULES  # noqa: F401  # registers the schema
from orchestrator.gangs import launch
from orchestrator.gangs.launch import (
    Allocation,
    GangSet,
    RayCluster,
    environment,
    launch_command,
    ray_cluster,
)
from orchestrator.nodes import preflight
from orchestrator.rules.cell_rules import problems
from orchestrator.show import show_plan
from orchestrator.store import Store
from workloads.spec import Backend, GangSpec, Model, Parallelism

TWO = Allocation("77", ["n7", "n8"])
EXECUTOR = "+backend.options.distributed_executor_backend=ray"


def gang_set(folder: Path, address: str | None, **backend: object) -> GangSet:
    layout = Parallelism(tp=4, dp=2, nodes=2, gpus_per_node=4)
    spec = GangSpec("candidate", str(folder), Model(), layout, Backend(**backend), {}, {}, [])  # type: ignore[arg-type]  # any subset of fields
    return GangSet(folder / "set", [spec], folder, parents=2, ray=RayCluster(address, 30))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cluster.ray.start=true"], "cluster.ray.start is on, but cluster.kind is local"),
        (
            ["cluster=ray", "cluster.ray.address='ray://head:10001'"],
            "which is not an address: write HOST:PORT",
        ),
        (["cluster=ray", "cluster.ray.address=head"], "which is not an address: write HOST:PORT"),
        (["cluster=ray", "cluster.ray.wait_s=0"], "cluster.ray.wait_s is 0; it must be more than 0 seconds."),
        (["cluster=slurm_ray", "cluster.image='a#b:1'"], "cluster.image is set, but Ray's actors run in"),
        ([EXECUTOR], "is ray, but there is no Ray cluster to share"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(words: Sequence[str], sentence: str) -> None:
    [one] = compose(words)
    assert one.root is not None, one.problems
    assert any(sentence in problem for problem in problems(one.root))


@pytest.mark.parametrize(
    "words", [["cluster=ray", "cluster.ray.address='[fd00::2]:6379'"], ["cluster=ray", EXECUTOR]]
)
def test_what_makes_sense_is_none(words: Sequence[str]) -> None:
    [one] = compose(words)
    assert one.root is not None, one.problems
    assert not [problem for problem in problems(one.root) if "cluster." in problem or "Ray" in problem]


def test_cells_from_before_there_was_ray_have_none() -> None:
    assert ray_cluster({"kind": "slurm"}) is None
    assert ray_cluster({"kind": "local", "ray": {"start": False, "address": "auto", "wait_s": 1}}) is None
    assert ray_cluster(
        {"kind": "slurm", "ray": {"start": True, "address": "auto", "wait_s": 1}}
    ) == RayCluster(None, 1)


def test_the_launcher_of_a_cluster_that_is_there_runs_on_this_machine(tmp_path: Path) -> None:
    command = launch_command(gang_set(tmp_path, "head:6379"), None)
    assert command[:3] == [sys.executable, "-P", str(launch.RAY_LAUNCH)]
    own, node = command[3 : command.index("--")], command[command.index("--") + 1 :]
    assert own == [
        "--nodes=2",
        "--ranks=4",
        "--wait=30",
        "--address=head:6379",
        "--set",
        str(tmp_path / "set"),
    ]
    assert node[1:] == ["-m", "workloads.node", str(tmp_path / "set"), "--attended"]


def test_gpus_are_reserved_unless_the_engines_own_executor_takes_them(tmp_path: Path) -> None:
    assert "--gpus" in launch_command(gang_set(tmp_path, "head:6379", device="cuda"), None)
    shared = {"distributed_executor_backend": "ray"}
    assert "--gpus" not in launch_command(
        gang_set(tmp_path, "head:6379", device="cuda", options=shared), None
    )


def test_a_step_starts_the_cluster_that_only_its_own_processes_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.socket, "gethostbyname", lambda host: "10.0.0.7")
    gangs = gang_set(tmp_path, None, device="cuda")
    command = launch_command(gangs, TWO)
    assert command[0] == "srun"
    assert "--gpus-per-node=4" in command
    script = command[command.index("bash") + 1 :]
    assert script[:4] == [str(launch.RAY_SCRIPT), "4", "4", sys.executable]  # CPUs, GPUs
    assert "--growing" in script
    assert not [word for word in script if word.startswith("--address")]  # which the script knows
    first, second = environment(gangs, TWO), environment(gangs, TWO)
    assert first["RAY_AUTH_MODE"] == "token"
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN" not in environment(gang_set(tmp_path, "head:6379"), None)


def test_a_plan_says_where_the_actors_are_and_what_they_reserve(tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), width=200)
    made = plan(["cluster=ray", "cluster.ray.address=head:6379", "parallelism=tp2", f"store={tmp_path}"])
    show_plan(out, made, Store(made.store))
    assert isinstance(out.file, io.StringIO)
    said = out.file.getvalue()
    assert (
        "gangs are actors in the Ray cluster at head:6379: nodes 1, of each CPUs 2, waited for up to 60 s"
        in said
    )
    assert "runs as processes of this machine" not in said


def test_without_the_package_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = plan(["cluster=ray", "parallelism=tp2", f"store={tmp_path}"]).cells[0].cell
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    place = preflight.Place(cell, Store(tmp_path), tmp_path, None)
    [problem] = preflight._ray(place)
    assert f"{sys.executable} has no ray: install it there" in problem
