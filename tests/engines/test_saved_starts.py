"""Starts of the released vLLM from files that it wrote itself. None of the three works on CPUs in 0.32.0: each ends as
an error with its cause and a script that shows it. The first release in which one works makes this fail."""

import ast
from pathlib import Path

import pytest

from tests.commands import orchestrate
from tests.engines.scripts import run_script

pytestmark = pytest.mark.vllm
CELL = ("model=tiny_llama", "parallelism=single", "backend=vllm_cpu", "collect=vllm")
SAID = {
    "sharded_state": ("Missing keys ('model.layers.0.self_attn.qkv_proj.weight'", "empties their parameters"),
    "tensorizer": ("Cannot access accelerator device", "asks for an accelerator"),
    "tensorizer_raw": ("has no attribute 'cpu_linear'", "left out the post-processing"),
}
EXECUTED = ("tensorizer_raw",)  # scripts that a test runs: it writes its files without an engine


@pytest.fixture(scope="module")
def store(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run store")


@pytest.mark.parametrize("via", sorted(SAID))
def test_a_start_that_the_engine_cannot_do_says_why(
    via: str, store: Path, vllm_python: Path, tmp_path: Path
) -> None:
    outcome = orchestrate(store, *CELL, f"load_path=vllm_{via}")
    assert outcome.exit_code == 3, outcome.output
    assert outcome.cell["verdict"] == "ERROR"
    assert outcome.left == []
    error, again = outcome.cell["error"], outcome.cell["reproduction"]
    assert error["type"] == "rank_failed"
    assert all(text in error["message"] for text in SAID[via]), error["message"]
    assert f"load_path=vllm_{via}" in again["command"]
    ast.parse(again["script"])
    assert "from vllm import LLM" in (outcome.folder / "report.md").read_text()  # type: ignore[operator]
    [saved] = (store / "cells" / outcome.cell["id"]).glob("attempt-*/fresh.new/saved")
    assert any(file.suffix in (".safetensors", ".tensors") for file in saved.iterdir())
    if via in EXECUTED:
        done = run_script(vllm_python, again["script"], tmp_path)
        assert done.returncode != 0, "a start that goes wrong is no success"
        assert SAID[via][0] in done.output, done.output[-4000:]
