"""Native engines of a toy DeepSeek-V4 for tests: one layer of each kind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_engine import NEW, OLD

from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism

TOY = DeepseekV4Config(
    num_layers=3, compress_ratios=[0, 4, 8, 0], num_hash_layers=1, num_experts=8, vocab_size=512
)


def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the toy, seed 0."""
    torch.set_num_threads(1)
    return generate_checkpoint(TOY, 0, tmp_path_factory.mktemp("deepseek_v4") / "checkpoint")


def make_spec(folder: Path, parallelism: Parallelism | None = None, **backend: Any) -> GangSpec:
    """A gang that knows the checkpoint in `folder` and a view of it with every tensor changed."""
    torch.set_num_threads(1)
    return GangSpec(
        name="candidate",
        output="",
        model=Model(name="toy", architecture="deepseek_v4", deepseek_v4=TOY),
        parallelism=parallelism or Parallelism(),
        backend=replace(Backend(max_model_len=128, max_requests=32), **backend),
        checkpoints={OLD: Checkpoint(), NEW: Checkpoint(perturbation="every_tensor")},
        checkpoint_dirs={OLD: str(folder), NEW: str(folder)},
        steps=[],
    )


def start_engine(
    folder: Path, checkpoint: str = OLD, via: str = "safetensors", **backend: Any
) -> NativeEngine:
    engine = NativeEngine(make_spec(folder, **backend), 0)
    engine.start(checkpoint, via)
    return engine
