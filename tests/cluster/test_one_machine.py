"""The scripts of the one-machine Slurm themselves."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm


def recorded_pids() -> dict[str, str]:
    folder = Path(os.environ["SLURM_CONF"]).parents[1] / "run"
    return {
        file.stem: file.read_text().strip()
        for file in folder.glob("*.pid")
        if not file.stem.startswith("own-")
    }


def test_second_up_starts_nothing_and_says_the_same(slurm: Callable[..., str]) -> None:
    before = recorded_pids()
    assert {"munged", "slurmctld", *(f"gb200-{node}" for node in range(4))} <= before.keys()
    # The script returns although its daemons live on: they hold none of its descriptors, else reading would wait.
    assert slurm("one_machine_up.sh") == f"export SLURM_CONF={os.environ['SLURM_CONF']}\n"
    assert recorded_pids() == before


def test_lost_node_comes_back_as_a_new_process(slurm: Callable[..., str]) -> None:
    before = recorded_pids()
    slurm("one_machine_node.sh", "fail", "gb200-2")
    assert not Path("/proc", before["gb200-2"], "exe").exists()
    slurm("one_machine_node.sh", "restore")
    after = recorded_pids()
    assert {name for name in before if after[name] != before[name]} == {"gb200-2"}
