"""What a Qwen3 stack needs: limits of its dimensions, what it derives, what its requests hold. Imports no torch."""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

from workloads.loading.tensor_table import DTYPE_BYTES
from workloads.models.planning import Experts, Load, Part
from workloads.models.qwen3.config import QUANTIZATIONS, Qwen3Config
from workloads.models.qwen3.formats import FORMATS, SCALAR

COMPONENTS = {
    "embedding": "embedding",
    "attention": "attention",
    "mlp": "MLP",
    "router": "router",
    "routed_experts": "routed experts",
    "norms": "norms",
    "head": "output head",
}
MAY_BE_ZERO = ("intermediate_size", "num_experts", "num_experts_per_token", "moe_intermediate_size")


def problems(c: Qwen3Config) -> Iterator[str]:
    if c.quantization not in QUANTIZATIONS:
        yield f"model.qwen3.quantization is {c.quantization!r}: use one of {', '.join(QUANTIZATIONS)}."
        return
    needed = ("moe_intermediate_size", "num_experts_per_token") if c.num_experts else ("intermediate_size",)
    for key in needed:
        if not getattr(c, key):
            yield (
                f"model.qwen3.{key} is 0 and num_experts is {c.num_experts}: a model with experts needs "
                "moe_intermediate_size and num_experts_per_token, one without needs intermediate_size."
            )
    if c.num_heads % c.num_key_value_heads:
        yield (
            f"model.qwen3.num_heads is {c.num_heads}; num_key_value_heads {c.num_key_value_heads} must divide it."
        )
    if c.head_dim % 2:
        yield f"model.qwen3.head_dim is {c.head_dim}; rotation turns pairs of channels, so it must be even."
    unit = FORMATS[c.quantization].unit
    for key in ("hidden_size", "head_dim", needed[0]):
        if getattr(c, key) % unit:
            yield (
                f"model.qwen3.{key} is {getattr(c, key)}; in {c.quantization} {unit} values share a scale, so it "
                "must be a multiple of that."
            )
    if c.intermediate // unit < c.num_key_value_heads:
        yield (
            f"model.qwen3.{needed[0]} is {c.intermediate}, {c.intermediate // unit} whole units of {unit} for up to "
            f"{c.num_key_value_heads} tensor-parallel ranks (num_key_value_heads): each rank needs one."
        )


def divided(c: Qwen3Config) -> Mapping[str, int]:
    return {key: getattr(c, key) for key in ("num_heads", "num_key_value_heads", "vocab_size")}


def experts(c: Qwen3Config) -> Experts | None:
    if not c.num_experts:
        return None
    return Experts(
        count=c.num_experts,
        per_token=c.num_experts_per_token,
        layers=c.num_layers,
        hidden=c.hidden_size,
        intermediate=c.moe_intermediate_size,
        quantization=c.quantization,
        keys={
            "count": "num_experts",
            "per_token": "num_experts_per_token",
            "hidden": "hidden_size",
            "intermediate": "moe_intermediate_size",
        },
        padding=partial(_expert_padding, c),
    )


def _expert_padding(c: Qwen3Config, tp: int, ep: int) -> Part:
    """What the experts' kernel adds to a rank's equal share of an expert: to all of it with expert parallelism."""
    form, ranks = FORMATS[c.quantization], tp if ep == 1 else 1
    _, _, padded = form.share(c.moe_intermediate_size, 0, ranks)
    used = -(-c.moe_intermediate_size // ranks)
    added = sum(
        prod(stored.shape(c.hidden_size, padded - used)) * DTYPE_BYTES[stored.held or stored.dtype]
        for stored in form.stored
        if stored.rows != SCALAR
    )
    nbytes = 3 * added * (c.num_experts // ep) * c.num_layers
    return Part("expert padding", "padding", nbytes, f"intermediate {used} -> {padded}")


def derived(c: Qwen3Config, tp: int) -> list[Part]:
    """Cosines and sines of all positions in FP32.

    Left out: the products of NVFP4's global scales, eight bytes a matrix, and the two bytes that each scale of an FP8
    tile grows by in FP32.
    """
    nbytes = c.max_position_embeddings * c.head_dim * 4
    return [
        Part("derived weights", "derived", nbytes, f"rotation of {c.max_position_embeddings:,} positions")
    ]


def caches(c: Qwen3Config, load: Load, tp: int) -> list[Part]:
    """Keys and values in BF16."""
    per_token = c.num_layers * 2 * c.num_key_value_heads // tp * c.head_dim * 2
    return [Part("KV cache", "cache", load.tokens * per_token, f"{load.tokens:,} tokens x {per_token:,} B")]
