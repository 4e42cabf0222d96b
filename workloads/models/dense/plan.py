"""What an ordinary decoder needs: limits of its dimensions, and its KV cache. Imports no torch."""

from collections.abc import Iterator, Mapping

from workloads.models.dense.config import DenseConfig
from workloads.models.planning import Load, Part

COMPONENTS = {
    "attention": "attention",
    "mlp": "dense MLP",
    "embedding": "embedding",
    "head": "output head",
    "norms": "norms",
}


def decoder_problems(c: DenseConfig, family: str) -> Iterator[str]:
    """family: under which `c` stands in `model`."""
    if c.num_heads % c.num_kv_heads:
        yield (
            f"model.{family}.num_heads is {c.num_heads}, which the num_kv_heads {c.num_kv_heads} do not divide: every "
            "head of keys serves equally many heads of queries."
        )
    if c.head_dim % 2:
        yield f"model.{family}.head_dim is {c.head_dim}; rotation takes its channels in pairs, so it must be even."


def decoder_divided(c: DenseConfig) -> Mapping[str, int]:
    keys = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    return {key: getattr(c, key) for key in keys}


def kv_cache(c: DenseConfig, layers: int, load: Load, tp: int) -> list[Part]:
    """Keys and values of `layers` layers in BF16."""
    per_token = layers * 2 * c.num_kv_heads // tp * c.head_dim * 2
    return [Part("KV cache", "cache", load.tokens * per_token, f"{load.tokens:,} tokens x {per_token:,} B")]
