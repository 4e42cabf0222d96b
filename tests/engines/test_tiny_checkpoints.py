"""Tiny checkpoints of transformers configurations, made in the engine's environment as `orchestrator` makes them."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from workloads.loading.checkpoint import check_finite, open_checkpoint

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
MODELS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("tiny_*.yaml"))
TIMEOUT_S = 240

SAVE = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
for name, config in json.load(open(sys.argv[1])).items():
    parsed = AutoConfig.for_model(**config)
    AutoModelForCausalLM.from_config(parsed, dtype=torch.float32).save_pretrained(f"{sys.argv[2]}/{name}")
"""
GENERATE = """
import json, sys
from pathlib import Path
from workloads.loading.transformers_checkpoint import generate_transformers_checkpoint
for name, config in json.load(open(sys.argv[1])).items():
    for folder, seed in (("first", 0), ("again", 0), ("other", 1)):
        generate_transformers_checkpoint(config, seed, Path(sys.argv[2], folder, name))
"""
LOAD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
for name in sys.argv[2:]:
    model, report = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        logits = model(torch.tensor([[256, 72, 101, 108, 108, 111]])).logits
    assert logits.isfinite().all(), name
    assert 0.5 < logits.std() < 8, (name, logits.std())
    assert model.config.eos_token_id == 257, model.config.eos_token_id
"""

REFUSED = """
import json, sys
from pathlib import Path
from workloads.loading.transformers_checkpoint import CheckpointError, generate_transformers_checkpoint
said = {}
for name, config in json.load(open(sys.argv[1])).items():
    try:
        generate_transformers_checkpoint(config, 0, Path(sys.argv[2], name))
    except CheckpointError as error:
        said[name] = str(error)
Path(sys.argv[2], "said.json").write_text(json.dumps(said))
"""


def _run(python: Path, script: str, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with the transformers part of every tiny model."""
    path = tmp_path_factory.mktemp("configs") / "configs.json"
    models = {name: yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text()) for name in MODELS}
    path.write_text(json.dumps({name: model["transformers"] for name, model in models.items()}))
    return path


@pytest.fixture(scope="module")
def generated(vllm_python: Path, configs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders first/NAME and again/NAME of seed 0, other/NAME of seed 1."""
    store = tmp_path_factory.mktemp("generated")
    _run(vllm_python, GENERATE, str(configs), str(store))
    return store


@pytest.fixture(scope="module")
def saved(vllm_python: Path, configs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders NAME of models that transformers made and saved."""
    store = tmp_path_factory.mktemp("saved")
    _run(vllm_python, SAVE, str(configs), str(store))
    return store


@pytest.mark.parametrize("name", MODELS)
def test_tensors_and_config_are_those_that_transformers_saves(
    generated: Path, saved: Path, name: str
) -> None:
    ours, theirs = open_checkpoint(generated / "first" / name), open_checkpoint(saved / name)
    assert {tensor: ours.meta(tensor) for tensor in ours.names()} == {
        tensor: theirs.meta(tensor) for tensor in theirs.names()
    }
    config = "config.json"
    assert json.loads((generated / "first" / name / config).read_text()) == json.loads(
        (saved / name / config).read_text()
    )


@pytest.mark.parametrize("name", MODELS)
def test_bytes_follow_from_the_seed(generated: Path, name: str) -> None:
    first, again, other = (generated / kind / name for kind in ("first", "again", "other"))
    digests = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        for folder in (first, again)
    ]
    assert digests[0] == digests[1]
    a, b = open_checkpoint(first), open_checkpoint(other)
    check_finite(a)
    for tensor in a.names():
        left, right = a.get(tensor), b.get(tensor)
        assert (left != right).float().mean() > 0.9, tensor
        assert left.numel() == 1 or left.unique().numel() > 1, tensor
    values = [hashlib.sha256(a.get(t).view(torch.uint8).numpy().tobytes()).digest() for t in a.names()]
    assert len(set(values)) == len(values), (
        "two tensors of one checkpoint are equal: swapping them would not show"
    )


def test_transformers_loads_and_runs_them(vllm_python: Path, generated: Path) -> None:
    _run(vllm_python, LOAD, str(generated / "first"), *MODELS)


def test_a_config_that_transformers_refuses_is_an_error_in_words(vllm_python: Path, tmp_path: Path) -> None:
    refused = "refuses the configuration of model.transformers"
    expected = {
        "qwen9": ({"model_type": "qwen9"}, "model_type is 'qwen9', which transformers 5.19.0 in "),
        "value": ({"model_type": "llama", "hidden_act": "sine"}, refused),
        "type": ({"model_type": "llama", "hidden_size": "wide"}, refused),
        "dtype": ({"model_type": "llama", "dtype": "int8"}, "Use one of float32, bfloat16, float16."),
        "task": ({"model_type": "vit"}, refused),
    }
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps({name: config for name, (config, _) in expected.items()}))
    _run(vllm_python, REFUSED, str(configs), str(tmp_path))
    said = json.loads((tmp_path / "said.json").read_text())
    for name, (_, message) in expected.items():
        assert message in said[name]
        assert not (tmp_path / name).exists()


def test_the_command_ends_with_the_error_in_words(vllm_python: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen9"}))
    command = [str(vllm_python), "-m", "workloads.loading.transformers_checkpoint"]
    done = subprocess.run(
        [*command, str(config), "0", str(tmp_path / "checkpoint")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert "does not know" in done.stderr.splitlines()[-1]
