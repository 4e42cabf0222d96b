"""Native engines of any family of models for tests, the same family as any rank holds it, and its parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from k3_engine import NEW, OLD

from workloads.engines.native import NativeEngine
from workloads.kernels.moe_choice import Machine, choose
from workloads.kernels.moe_kernels import make_moe_kernel
from workloads.loading.weights import ModelRoot, Part
from workloads.models.architectures import ARCHITECTURES
from workloads.models.parallel import Group, RankGroups
from workloads.models.served import Drafter, Setting, Target, model_stack
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism


def family(config: Any) -> str:
    """The family whose dimensions `config` is."""
    [name] = [name for name, kind in ARCHITECTURES.items() if type(config) is kind]
    return name


def make_spec(folder: Path, config: Any, parallelism: Parallelism | None = None, **backend: Any) -> GangSpec:
    """A gang that knows the checkpoint in `folder` and a view of it with every tensor changed."""
    torch.set_num_threads(1)
    name = family(config)
    small = Backend(moe_kernel="reference", max_model_len=128, max_batch_tokens=256, max_requests=8)
    return GangSpec(
        name="candidate",
        output="",
        model=Model(f"{name}_toy", name, **{name: config}),
        parallelism=parallelism or Parallelism(),
        backend=replace(small, **backend),
        checkpoints={OLD: Checkpoint(), NEW: Checkpoint(perturbation="every_tensor")},
        checkpoint_dirs={OLD: str(folder), NEW: str(folder)},
        steps=[],
    )


def start_engine(
    folder: Path, config: Any, checkpoint: str = OLD, via: str = "safetensors", **backend: Any
) -> NativeEngine:
    engine = NativeEngine(make_spec(folder, config, **backend), 0)
    engine.start(checkpoint, via)
    return engine


def roots_of_rank(
    config: Any, tp: int = 1, ep: int = 1, rank: int = 0, kernel: str = "reference"
) -> dict[str, Target | Drafter]:
    """All models as `rank` holds them; without a process group, so they can be loaded but not run together."""
    groups = RankGroups(Group(rank, max(tp, ep)), Group(rank % tp, tp), Group(rank % ep, ep))
    choice = choose(kernel, Machine(), None, ep)
    setting = Setting(config, groups, make_moe_kernel(choice.kernel), fused=choice.has_layout)
    return dict(model_stack(family(config)).make_roots(setting))


def parts_of(name: str, root: ModelRoot) -> list[Part]:
    return [part for path, module in root.weight_modules() for part in module.parts(f"{name}:{path}")]
