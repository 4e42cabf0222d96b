"""Small Qwen3 models of every kind for tests, their checkpoints, and native engines of them."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from k3_engine import NEW, OLD, make_spec

from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.models.qwen3.config import Qwen3Config
from workloads.spec import GangSpec, Model, Parallelism

_SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "vocab_size": 264,
    "max_position_embeddings": 256,
    "head_dim": 32,
    "num_key_value_heads": 2,
}
_EXPERTS: dict[str, Any] = {
    **_SHAPE,
    "tie_word_embeddings": False,
    "intermediate_size": 0,
    "num_experts": 8,
    "num_experts_per_token": 3,
}
CONFIGS = {
    "dense_fp8": Qwen3Config(**{**_SHAPE, "head_dim": 128, "intermediate_size": 384}),
    "dense_bf16": Qwen3Config(**_SHAPE, intermediate_size=96, quantization="bf16"),
    "dense_nvfp4": Qwen3Config(**_SHAPE, intermediate_size=96, quantization="nvfp4"),
    "moe_bf16": Qwen3Config(**_EXPERTS, moe_intermediate_size=96, quantization="bf16"),
    "moe_fp8": Qwen3Config(**{**_EXPERTS, "head_dim": 128}, moe_intermediate_size=384),
    "moe_nvfp4": Qwen3Config(**_EXPERTS, moe_intermediate_size=96, quantization="nvfp4"),
}
_WIDE: dict[str, Any] = {
    **_EXPERTS,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
}
#: With the expert width of Qwen3-30B-A3B, which four ranks share as in the published model.
WIDE = {
    "wide_bf16": Qwen3Config(**_WIDE, quantization="bf16"),
    "wide_fp8": Qwen3Config(**{**_WIDE, "head_dim": 128}, quantization="fp8"),
    "wide_nvfp4": Qwen3Config(**_WIDE, quantization="nvfp4"),
}
_FOLDER = TemporaryDirectory(prefix="qwen3-")
SPARSE = [name for name in CONFIGS if name.startswith("moe")]
QUANTISED = [name for name, config in CONFIGS.items() if config.quantization != "bf16"]


@cache
def checkpoint(name: str) -> Path:
    """Folder of the generated weights of a model of `CONFIGS` or `WIDE`, seed 0."""
    return generate_checkpoint((CONFIGS | WIDE)[name], 0, Path(_FOLDER.name) / name)


def qwen3_spec(name: str, parallelism: Parallelism | None = None, **backend: Any) -> GangSpec:
    spec = make_spec(checkpoint(name), parallelism, moe_kernel="reference", **backend)
    return replace(spec, model=Model(name=name, architecture="qwen3", qwen3=(CONFIGS | WIDE)[name]))


def start_qwen3(name: str, weights: str = OLD, via: str = "safetensors", **backend: Any) -> NativeEngine:
    engine = NativeEngine(qwen3_spec(name, **backend), 0)
    engine.start(weights, via)
    return engine


__all__ = ["CONFIGS", "NEW", "OLD", "QUANTISED", "SPARSE", "WIDE", "checkpoint", "qwen3_spec", "start_qwen3"]
