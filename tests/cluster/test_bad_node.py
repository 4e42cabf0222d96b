"""A node that is unfit, on the real Slurm: found before anything ran, named, avoided, the cell measured elsewhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.cluster import quarantine
from orchestrator.store import read_json
from tests.cluster.toy_experiment import ROOT, Toys, toys

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("clean")]
THREE_NODES = "parallelism={tp: 1, dp: 3, ep: 1, nodes: 3, gpus_per_node: 1}"


def hide(folder: Path, node: str) -> None:
    """An empty file system lies over the folder there, until the node's mount namespace ends with it."""
    pid = Path(os.environ["SLURM_CONF"]).parents[1] / "run" / f"{node}.pid"  # of what holds the namespace
    there = ["nsenter", f"--target={pid.read_text().strip()}", "--mount"]
    subprocess.run([*there, "mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)


def test_a_node_without_the_cells_is_named_and_avoided(tmp_path: Path) -> None:
    """Though somebody works on the arm's tree while its jobs wait."""
    for folder in ("workloads", "collectors"):
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder)
    cell = ["load_path=cold", "backend.moe_kernel=reference", THREE_NODES]
    run = Toys(toys(tmp_path, *cell, f"code.candidate.path='{tmp_path / 'tree'}'"), {0: ["check"]})
    hide(run.store.cells, "gb200-1")
    run.look()
    shutil.rmtree(tmp_path / "tree" / "workloads")
    run.over(200)
    assert run.ends(0) == ["bad_node", "PASS"]
    first, second = run.store.attempts(run.names[0])
    error = read_json(first / "result.json")["error"]
    assert error["node"] == "gb200-1"
    assert error["message"].startswith("Node gb200-1 failed in its stage 'files': FileNotFoundError")
    assert quarantine.nodes(run.store) == ["gb200-1"]
    found = read_json(second / "provenance.json")["preflight"]
    assert sorted(found["nodes"]) == ["gb200-0", "gb200-2", "gb200-3"]
    assert all(node["whole"]["bandwidth"]["cpu"]["all_reduce"] > 0 for node in found["nodes"].values())
    assert max(map(abs, found["clock_offset_s"].values())) < 1, "they share one clock"
