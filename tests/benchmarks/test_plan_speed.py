"""Planning stays quick: one experiment in a few times the imports of its libraries, a cell in a third of Hydra's own.

Processor time is asserted and wall time printed: the suite shares its machine.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.types import RunMode

from orchestrator.config.compose import Composer, conf_dir
from orchestrator.config.planning import plan
from orchestrator.provenance import checkout
from orchestrator.store import Store

SWEEP = [
    "checkpoints.old.seed=range(125)",
    "load_path=cold,direct,layerwise,dummy_layerwise",
    "parallelism=tp2,tp2_dp2_ep4",
    "cluster.memory_gb=2",
]
CELLS = 1000
MOST_IMPORTS = 8.0


def bare_compose_seconds(repeats: int = 5) -> float:
    """Processor time of one cell by Hydra alone. Its own sweeper composes each cell twice."""
    loader = ConfigLoaderImpl(create_config_search_path(f"file://{conf_dir()}"))
    Composer()  # registers what Hydra's loader expects of an application
    overrides = ["checkpoints.old.seed=1", "load_path=cold", "parallelism=tp2", "cluster.memory_gb=2"]
    times = []
    for _ in range(repeats):
        began = time.process_time()
        loader.load_configuration("config", overrides, RunMode.RUN)
        times.append(time.process_time() - began)
    return min(times)


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processor_seconds(command: list[str]) -> float:
    began = children_seconds()
    subprocess.run(command, check=True, capture_output=True, cwd=checkout())
    return children_seconds() - began


def test_one_experiment_is_planned_in_the_time_of_a_few_imports(tmp_path: Path) -> None:
    """The whole command, interpreter start included, beside the start and the imports that it cannot do without. About
    two seconds on an idle machine."""
    overrides = ["+exp=kimi_k3_refit", "model=kimi_k3", "cluster=gb200", f"store={tmp_path}"]
    whole, imports = [], []
    for _ in range(3):
        whole.append(processor_seconds([sys.executable, "-m", "orchestrator", "plan", *overrides]))
        imports.append(
            processor_seconds([sys.executable, "-c", "import hydra, submitit, rich.console, jinja2"])
        )
    ratio = min(whole) / min(imports)
    print(f"plan of one experiment: {min(whole):.2f} s of processor time, {ratio:.1f} x the imports alone")
    assert ratio <= MOST_IMPORTS


def test_a_thousand_cells_are_planned_and_written(tmp_path: Path) -> None:
    """A cell must cost a fraction of one bare composition by Hydra: that bound holds on any machine."""
    bare = bare_compose_seconds()
    began, wall = time.process_time(), time.perf_counter()
    made = plan(SWEEP, multirun=True)
    planned = time.process_time() - began
    store = Store.open(tmp_path)
    for one in made.cells:
        store.write_cell(one.cell)
    spent, wall = time.process_time() - began, time.perf_counter() - wall
    stamps = {path: path.stat().st_mtime_ns for path in store.cells.glob("*/cell.json")}
    for one in made.cells:
        store.write_cell(one.cell)
    print(
        f"{CELLS} cells: {planned:.1f} s to plan, {spent - planned:.1f} s to write, {wall:.1f} s on the clock; "
        f"{spent / CELLS * 1e3:.1f} ms a cell, Hydra alone {bare * 1e3:.0f} ms"
    )
    assert len(made.cells) == len(stamps) == CELLS
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps, "cells are written once"
    assert spent / CELLS <= bare / 3
