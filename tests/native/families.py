"""A toy of every family of models, and of each of its kinds, for the tests that all of them must pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deepseek_v4_engine import TOY as DEEPSEEK_V4
from deepseek_v41_toy import CONSTANT, PADDING
from deepseek_v41_toy import TOY as DEEPSEEK_V41
from dense_families import MEDIA
from dense_families import VARIANTS as DENSE
from dspark_engine import CONSTANT as DSPARK_CONSTANT
from dspark_engine import GIVEN as DSPARK_GIVEN
from dspark_engine import TOYS as DSPARK
from family_engine import family, make_spec
from gpt_oss_engine import CONFIGS as GPT_OSS
from k3_engine import NEW, OLD, generate, held_bytes, prompts
from qwen3_engine import CONFIGS as QWEN3

from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.loading.generate import generate_checkpoint
from workloads.loading.tensor_table import Section
from workloads.models.architectures import tensor_table
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import GangSpec, Parallelism

Bytes = dict[str, torch.Tensor]
Padding = frozenset[tuple[str, float]]


@dataclass(frozen=True)
class Toy:
    """given: prompts that reach all of the model. layouts: (tp, dp, ep) into which it is divided.

    kernels: of its routed experts. constant: ends of the audit paths of what follows from the dimensions alone.
    padding: last name and creation value of what is padded, on any rank of any layout. drafter: there is one.
    """

    config: Any
    given: Sequence[Prompt]
    layouts: Sequence[tuple[int, int, int]]
    kernels: Sequence[str] = ("reference",)
    constant: tuple[str, ...] = ()
    padding: Padding = frozenset()
    drafter: bool = False


MEGA_MOE = ("mega_moe", "reference")
# Of gpt-oss, widths of both matrices to the kernel's tile; of Qwen3, experts' channels to the kernel's tile, or the
# blocks that another rank has more than this one.
_PADDED_EXPERTS = frozenset(
    (f"{matrix}_{piece}", value)
    for matrix in ("w13", "w2")
    for piece, value in (("weight", 0.0), ("weight_scale", 1.0), ("bias", 0.0))
)
_PADDED_CHANNELS = frozenset({("kernel_weight", 0.0), ("weight", 0.0)})
_PADDED_BLOCKS = frozenset({("weight", 0.0), ("weight_scale", 1.0)})
_QWEN3_PADDING = {
    "dense_fp8": _PADDED_BLOCKS,
    "moe_bf16": _PADDED_CHANNELS,
    "moe_fp8": _PADDED_BLOCKS | _PADDED_CHANNELS,
}

TOYS: dict[str, Toy] = {
    "kimi_k3": Toy(
        KimiK3Config(),
        prompts(1, 30, 70),  # the last is more than one chunk of KDA
        [(2, 1, 2), (2, 1, 1), (2, 2, 2), (4, 4, 16)],
        MEGA_MOE,
        drafter=True,
        padding=frozenset(
            {("weight", 0.0)}  # rows of the fused KDA projection
            | {
                (f"_transformed_l{i}_weights[{item}]", value)
                for i in (1, 2)
                for item, value in enumerate((0.0, 127.0))
            }
        ),
    ),
    "deepseek_v4": Toy(
        DEEPSEEK_V4,
        prompts(1, 5, 70),  # the last fills the window and makes more groups than the indexer may choose
        [(2, 1, 1), (2, 1, 2), (2, 2, 4), (1, 4, 4)],
        MEGA_MOE,
        drafter=True,
        constant=("cos_sin_cache",),
        padding=frozenset({("weight", -torch.inf)}),  # sinks of the heads that fill up the kernel's tile
    ),
    "deepseek_v41": Toy(
        DEEPSEEK_V41,
        prompts(1, 5, 40),  # the last makes more entries than the filter lets through
        [(2, 1, 1), (2, 2, 4), (1, 4, 4)],
        MEGA_MOE[:1],
        constant=CONSTANT,
        padding=PADDING,
    ),
    **{
        f"gpt_oss_{layout}": Toy(
            config,
            prompts(1, 5, 20),  # the last is longer than the window
            [(2, 1, 1), (2, 1, 2), (2, 2, 4), (1, 4, 4)] if layout == "combined" else [(2, 1, 1)],
            constant=("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "inv_freq"),
            padding=_PADDED_EXPERTS,
        )
        for layout, config in GPT_OSS.items()
    },
    **{
        f"qwen3_{name}": Toy(
            config,
            prompts(1, 5, 20),
            [(2, 1, 1), (2, 1, 2), (2, 2, 4)] if config.num_experts else [(2, 1, 1), (2, 2, 1)],
            constant=("cos_sin_cache",),
            padding=_QWEN3_PADDING.get(name, frozenset()),
        )
        for name, config in QWEN3.items()
    },
    **{
        name: Toy(
            config,
            [*prompts(1, 30, 6), MEDIA],
            [(2, 1, 1), (2, 2, 4), (4, 1, 1)],
            constant=("inv_freq", "pos_embed"),
            drafter=not name.startswith("minicpm"),
        )
        for name, config in DENSE.items()
    },
}
TOYS |= {
    f"{name}_dspark": Toy(
        config,
        [*DSPARK_GIVEN, *([MEDIA] if getattr(config, "vision", False) else [])],
        [(2, 1, 1), (2, 2, 4)] if name == "deepseek_v41" else [(2, 1, 1), (2, 2, 2), (2, 2, 4), (1, 4, 4)],
        TOYS[name].kernels,
        constant=DSPARK_CONSTANT,
        padding=TOYS[name].padding,
        drafter=True,
    )
    for name, config in DSPARK.items()
}
_FOLDER = TemporaryDirectory(prefix="families-")


@cache
def checkpoint(name: str) -> Path:
    """Folder of a toy's generated weights, seed 0."""
    torch.set_num_threads(1)
    return generate_checkpoint(TOYS[name].config, 0, Path(_FOLDER.name) / name)


def table_of(name: str) -> Iterator[Section]:
    """The tensors of its checkpoint."""
    config = TOYS[name].config
    return tensor_table(family(config)).sections(config)


def toy_spec(name: str, parallelism: Parallelism | None = None, **backend: Any) -> GangSpec:
    toy = TOYS[name]
    return make_spec(checkpoint(name), toy.config, parallelism, **{"moe_kernel": toy.kernels[0]} | backend)


def start_toy(name: str, weights: str = OLD, via: str = "safetensors", **backend: Any) -> NativeEngine:
    engine = NativeEngine(toy_spec(name, **backend), 0)
    engine.start(weights, via)
    return engine


@dataclass(frozen=True)
class Fresh:
    """What a fresh start holds, by audit path, and what it says."""

    held: Bytes
    said: list[tuple[Any, ...]]


@cache
def fresh(name: str, weights: str, kernel: str = "") -> Fresh:
    engine = start_toy(name, weights, moe_kernel=kernel or TOYS[name].kernels[0])
    before = held_bytes(engine)
    return Fresh(before, generate(engine, TOYS[name].given, 2))


__all__ = ["NEW", "OLD", "TOYS", "Fresh", "checkpoint", "fresh", "start_toy", "table_of", "toy_spec"]
