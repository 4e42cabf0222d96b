"""The launch command says everything itself, and inherits nothing that steers it."""

import socket
from pathlib import Path

import pytest

from orchestrator.failure import AttemptError
from orchestrator.gangs import launch
from orchestrator.gangs.launch import (
    Allocation,
    GangSet,
    environment,
    free_port,
    launch_command,
    master_address,
)
from workloads.spec import Backend, GangSpec, Model, Parallelism


def gang_set(folder: Path, device: str = "cpu", **values: object) -> GangSet:
    layout = Parallelism(tp=4, dp=4, ep=16, nodes=4, gpus_per_node=4)
    spec = GangSpec(
        "candidate", str(folder / "candidate"), Model(), layout, Backend(device=device), {}, {}, []
    )
    return GangSet(folder / "set", [spec], folder / "tree", **values)  # type: ignore[arg-type]  # any subset of fields


FOUR = Allocation("77", ["n7", "n8", "n9", "n10"])


def test_one_parent_runs_all_ranks_on_this_machine(tmp_path: Path) -> None:
    command = launch_command(gang_set(tmp_path, python="/engine/python"), None)
    assert command[:4] == ["/engine/python", "-m", "workloads.node", str(tmp_path / "set")]
    assert command[command.index("--ranks") + 1] == "0:16"
    assert "--attended" in command
    assert master_address(None) == "127.0.0.1"


def test_a_step_is_explicit_about_nodes_tasks_and_its_end(tmp_path: Path) -> None:
    command = launch_command(gang_set(tmp_path, parents=4), FOUR)
    options = command[1 : command.index("bash")]
    assert command[0] == "srun"
    for option in ("--jobid=77", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--nodelist=n7,n8,n9,n10"):
        assert option in options
    assert "--kill-on-bad-exit=1" in options
    assert not [option for option in options if option.startswith(("--gpus", "--container"))]
    assert command[command.index("bash") + 2] == "4"  # ranks of each node
    assert master_address(FOUR) == "n7"


def test_a_step_with_gpus_in_a_container_asks_for_both(tmp_path: Path) -> None:
    gangs = gang_set(
        tmp_path, "cuda", parents=4, image="registry#image:1", mounts=["/store:/store"], python="python3"
    )
    options = launch_command(gangs, FOUR)
    assert "--gpus-per-node=4" in options
    assert "--container-image=registry#image:1" in options
    [mounts] = [option for option in options if option.startswith("--container-mounts=")]
    for mount in (
        f"{tmp_path / 'tree'}:{tmp_path / 'tree'}",
        "/store:/store",
        f"{launch.STEP_SCRIPT.parent}:",
    ):
        assert mount in mounts


def test_too_small_a_job_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(AttemptError, match=r"needs 4 nodes, job 77 has 2: n7, n8"):
        launch_command(gang_set(tmp_path, parents=4), Allocation("77", ["n7", "n8"]))


def test_scheduler_variables_are_gone_and_ours_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CPU_BIND", "SLURM_JOB_ID", "SBATCH_PARTITION", "SRUN_DEBUG", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.setenv(name, "leaked")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("PYTHONPATH", "/before")
    variables = environment(gang_set(tmp_path, environment={"OMP_NUM_THREADS": "3"}), None)
    assert not [name for name, value in variables.items() if value == "leaked"]
    assert variables["SLURM_CONF"] == "/etc/slurm.conf"
    assert variables["PYTHONPATH"] == f"{tmp_path / 'tree'}:/before"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"


def test_gloo_uses_loopback_only_where_all_nodes_live_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    addresses = dict.fromkeys(FOUR.hosts, "127.0.1.10")
    monkeypatch.setattr(launch.socket, "gethostbyname", addresses.__getitem__)
    assert environment(gang_set(tmp_path), FOUR)["GLOO_SOCKET_IFNAME"] == "lo"
    addresses["n9"] = "10.0.0.9"
    assert "GLOO_SOCKET_IFNAME" not in environment(gang_set(tmp_path), FOUR)


def test_free_port_can_be_bound_and_is_no_ephemeral_one() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("", port))
    assert port < 32_768


def test_port_in_use_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        monkeypatch.setattr(launch.random, "sample", lambda ports, count: [taken.getsockname()[1]])
        with pytest.raises(AttemptError, match="all are in use"):
            free_port()
