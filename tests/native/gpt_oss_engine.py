"""Native engines of a toy gpt-oss for tests, and what they hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import family_engine
import torch
from k3_engine import OLD

from workloads.engines.native import NativeEngine
from workloads.kernels.moe import MoEKernel
from workloads.loading.checkpoint import CheckpointReader, open_checkpoint
from workloads.loading.generate import generate_checkpoint
from workloads.loading.shards import TensorMeta
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import ModelRoot, Part
from workloads.loading.writer import write_checkpoint
from workloads.models.gpt_oss.config import CHECKPOINT_LAYOUTS, GptOssConfig
from workloads.models.gpt_oss.model import GptOssForCausalLM
from workloads.models.gpt_oss.tensors import sections
from workloads.models.parallel import Group, RankGroups
from workloads.models.served import Setting

TOY = GptOssConfig(num_layers=2, vocab_size=512, sliding_window=6, num_experts=8)
EXPERTS = "model.layers.1.mlp.experts"
CONFIGS = {layout: replace(TOY, checkpoint_layout=layout) for layout in CHECKPOINT_LAYOUTS}
PARAMETERS = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")


def start_engine(
    folder: Path,
    checkpoint: str = OLD,
    via: str = "safetensors",
    config: GptOssConfig = TOY,
    **backend: Any,
) -> NativeEngine:
    return family_engine.start_engine(folder, config, checkpoint, via, **backend)


def root_of_rank(config: GptOssConfig, tp: int, ep: int, rank: int) -> ModelRoot:
    """The model as `rank` holds it; without a process group, so it can be loaded but not run. Its experts bring
    their own kernel."""
    groups = RankGroups(Group(rank, max(tp, ep)), Group(rank % tp, tp), Group(rank % ep, ep))
    return GptOssForCausalLM(Setting(config, groups, cast(MoEKernel, None), fused=False))


def parts_of(root: ModelRoot) -> list[Part]:
    return [part for path, module in root.weight_modules() for part in module.parts(f"target:{path}")]


def write_layouts(folder: Path) -> dict[str, Path]:
    """Checkpoints of the same values in each layout."""
    torch.set_num_threads(1)
    combined = generate_checkpoint(TOY, 0, folder / "combined")
    reader = open_checkpoint(combined)
    singly = {layout: _one_by_one(reader, layout, folder) for layout in ("per_expert", "quark")}
    return {"combined": combined, **singly}


def _one_by_one(reader: CheckpointReader, layout: str, folder: Path) -> Path:
    """The checkpoint of `reader` with a tensor of its own for each expert."""
    suffixes = {"weight_packed": "blocks", "weight": "blocks", "weight_scale": "scales", "bias": "bias"}

    def make(name: str) -> torch.Tensor:
        before, separator, after = name.partition(".experts.")
        if not separator:
            return reader.get(name)
        expert, matrix, piece = after.split(".")
        tensor = reader.get(f"{before}.experts.{matrix}_{suffixes[piece]}")[int(expert)]
        return tensor.flatten(-2) if piece.startswith("weight") and piece != "weight_scale" else tensor

    specs = list(every_tensor(sections(CONFIGS[layout])))
    named = [(spec.name, TensorMeta(spec.dtype, spec.shape)) for spec in specs]
    return write_checkpoint(folder / layout, layout, named, make, 1 << 30, {})


def is_filled(part: Part) -> bool:
    """Whether padding holds what it was created with."""
    assert part.padding_value is not None
    return bool(torch.eq(part.value, part.padding_value).all())
