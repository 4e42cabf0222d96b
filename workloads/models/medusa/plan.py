"""What a target with Medusa heads needs beside its weights. Imports no torch."""

from collections.abc import Iterator, Mapping

from workloads.models.dense import plan as dense
from workloads.models.medusa.config import MedusaConfig
from workloads.models.planning import Experts, Load, Part

COMPONENTS = {**dense.COMPONENTS, "draft": "Medusa heads"}
MAY_BE_ZERO: tuple[str, ...] = ()


def problems(c: MedusaConfig) -> Iterator[str]:
    yield from dense.decoder_problems(c, "medusa")
    if c.draft_vocab_size > c.vocab_size:
        yield (
            f"model.medusa.draft_vocab_size is {c.draft_vocab_size}, more than the vocab_size {c.vocab_size} that its "
            "tokens are taken from."
        )

    if c.vocab_size % 2:
        yield (
            f"model.medusa.vocab_size is {c.vocab_size}; a checkpoint with every tensor changed swaps neighbouring ids "
            "of the token map, so it must be even."
        )


def divided(c: MedusaConfig) -> Mapping[str, int]:
    return {**dense.decoder_divided(c), "draft_vocab_size": c.draft_vocab_size}


def experts(c: MedusaConfig) -> Experts | None:
    return None


def derived(c: MedusaConfig, tp: int) -> list[Part]:
    return []


def caches(c: MedusaConfig, load: Load, tp: int) -> list[Part]:
    """Medusa heads read one hidden state and keep nothing."""
    return dense.kv_cache(c, c.num_layers, load, tp)
