"""Native engines of a toy gpt-oss for tests, and what they hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from k3_engine import NEW, OLD

from workloads.engines.native import NativeEngine
from workloads.kernels.moe import MoEKernel
from workloads.loading.weights import ModelRoot, Part
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.models.gpt_oss.model import GptOssForCausalLM
from workloads.models.parallel import Group, RankGroups
from workloads.models.served import Setting
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism

TOY = GptOssConfig(num_layers=2, vocab_size=512, sliding_window=6, num_experts=8)
EXPERTS = "model.layers.1.mlp.experts"
PARAMETERS = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")


def make_spec(
    folder: Path, config: GptOssConfig = TOY, parallelism: Parallelism | None = None, **backend: Any
) -> GangSpec:
    """A gang that knows the checkpoint in `folder` and a view of it with every tensor changed."""
    torch.set_num_threads(1)
    return GangSpec(
        name="candidate",
        output="",
        model=Model("gpt_oss_toy", "gpt_oss", gpt_oss=config),
        parallelism=parallelism or Parallelism(),
        backend=replace(
            Backend(moe_kernel="reference", max_model_len=128, max_batch_tokens=256, max_requests=8),
            **backend,
        ),
        checkpoints={OLD: Checkpoint(), NEW: Checkpoint(perturbation="every_tensor")},
        checkpoint_dirs={OLD: str(folder), NEW: str(folder)},
        steps=[],
    )


def start_engine(
    folder: Path,
    checkpoint: str = OLD,
    via: str = "safetensors",
    config: GptOssConfig = TOY,
    **backend: Any,
) -> NativeEngine:
    engine = NativeEngine(make_spec(folder, config, **backend), 0)
    engine.start(checkpoint, via)
    return engine


def root_of_rank(config: GptOssConfig, tp: int, ep: int, rank: int) -> ModelRoot:
    """The model as `rank` holds it; without a process group, so it can be loaded but not run. Its experts bring
    their own kernel."""
    groups = RankGroups(Group(rank, max(tp, ep)), Group(rank % tp, tp), Group(rank % ep, ep))
    return GptOssForCausalLM(Setting(config, groups, cast(MoEKernel, None), fused=False))


def parts_of(root: ModelRoot) -> list[Part]:
    return [part for path, module in root.weight_modules() for part in module.parts(f"target:{path}")]
