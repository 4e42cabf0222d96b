"""Toys with a DSpark drafter for tests, of every family that has one, and their weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deepseek_v41_toy import CONSTANT as ENGRAM
from family_engine import make_spec
from k3_engine import NEW, OLD, generate, held_bytes, prompts

from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.loading.perturb import open_view
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import GangSpec, Parallelism

TOYS: dict[str, Any] = {
    "kimi_k3": KimiK3Config(
        num_layers=3,
        full_attention_layers=[2],
        hidden_size=64,
        vocab_size=512,
        num_experts=4,
        num_experts_per_token=2,
        num_mtp_layers=0,
        num_dspark_layers=2,
    ),
    "deepseek_v4": DeepseekV4Config(
        num_layers=3,
        compress_ratios=[0, 4, 8, 0, 0],
        num_hash_layers=1,
        num_experts=4,
        vocab_size=512,
        num_mtp_layers=0,
        num_dspark_layers=2,
        dspark_min_confidence=0.01,
    ),
    "deepseek_v41": DeepseekV41Config(  # whose target is inside the vision wrapper
        num_layers=4,
        hidden_size=128,
        vocab_size=352,
        compress_ratios=[0, 2, 1, 1, 0, 0],
        kv_source_layers=[1, 2],
        index_source_layers=[1, 2, 3],
        candidate_source_layer=2,
        engram_layers=[1, 3],
        engram_vocab_size=97,
        num_experts=4,
        vision=True,
        num_dspark_layers=2,
        dspark_target_layer_ids=[1, 3],  # both after Engram
        dspark_mask_token_id=340,
        dspark_num_experts=8,
        dspark_num_experts_per_token=3,
        dspark_min_confidence=0.1,
    ),
}
GIVEN = prompts(1, 6, 40)  # the last is longer than the window of DeepSeek-V4
CONSTANT = ("inv_freq", "cos_sin_cache", *ENGRAM)  # ends of paths of what follows from the dimensions alone
_FOLDER = TemporaryDirectory(prefix="dspark-")


@cache
def checkpoint(name: str) -> Path:
    torch.set_num_threads(1)
    return generate_checkpoint(TOYS[name], 0, Path(_FOLDER.name) / name)


def spec_of(name: str, parallelism: Parallelism | None = None, **backend: Any) -> GangSpec:
    return make_spec(checkpoint(name), TOYS[name], parallelism, **{"moe_kernel": "mega_moe", **backend})


def start(name: str, weights: str = OLD, via: str = "safetensors", **backend: Any) -> NativeEngine:
    engine = NativeEngine(spec_of(name, **backend), 0)
    engine.start(weights, via)
    return engine


@cache
def fresh(name: str, weights: str) -> tuple[dict[str, torch.Tensor], list[tuple[Any, ...]]]:
    """What a fresh start holds, by audit path, and what it says."""
    engine = start(name, weights)
    return held_bytes(engine), generate(engine, GIVEN, 3)


def stored(name: str, weights: str = OLD) -> Callable[[str], torch.Tensor]:
    """A tensor of the checkpoint by its name."""
    spec = spec_of(name)
    return open_view(spec.checkpoints[weights], Path(spec.checkpoint_dirs[weights])).get


__all__ = ["CONSTANT", "GIVEN", "NEW", "OLD", "TOYS", "checkpoint", "fresh", "spec_of", "start", "stored"]
