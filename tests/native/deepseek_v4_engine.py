"""Native engines of a toy DeepSeek-V4 for tests: one layer of each kind."""

from pathlib import Path
from typing import Any

import family_engine
import pytest
import torch
from k3_engine import OLD

from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.spec import GangSpec, Parallelism

TOY = DeepseekV4Config(
    num_layers=3, compress_ratios=[0, 4, 8, 0], num_hash_layers=1, num_experts=8, vocab_size=512
)
BACKEND: dict[str, Any] = {"moe_kernel": "mega_moe", "max_requests": 32}


def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the toy, seed 0."""
    torch.set_num_threads(1)
    return generate_checkpoint(TOY, 0, tmp_path_factory.mktemp("deepseek_v4") / "checkpoint")


def make_spec(folder: Path, parallelism: Parallelism | None = None, **backend: Any) -> GangSpec:
    return family_engine.make_spec(folder, TOY, parallelism, **BACKEND | backend)


def start_engine(
    folder: Path, checkpoint: str = OLD, via: str = "safetensors", **backend: Any
) -> NativeEngine:
    return family_engine.start_engine(folder, TOY, checkpoint, via, **BACKEND | backend)
