"""What an OpenPangu stack needs beside its weights. Imports no torch."""

from collections.abc import Iterator, Mapping

from workloads.models.dense import plan as dense
from workloads.models.media import slot_problems
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.planning import Experts, Load, Part, drafters_own

COMPONENTS = {**dense.COMPONENTS, "mtp": "MTP block", "vision": "image projector"}
MAY_BE_ZERO = ("num_mtp_layers",)


def problems(c: OpenPanguConfig) -> Iterator[str]:
    yield from dense.decoder_problems(c, "openpangu")
    if c.num_mtp_layers > 1:
        yield f"model.openpangu.num_mtp_layers is {c.num_mtp_layers}; the drafter has one block at most."
    if c.vision:
        keys = "image_token_start and image_lengths"
        yield from slot_problems("openpangu", keys, c.image_token_start, c.image_lengths, c.vocab_size)


def divided(c: OpenPanguConfig) -> Mapping[str, int]:
    return dense.decoder_divided(c)


def experts(c: OpenPanguConfig) -> Experts | None:
    return None


def derived(c: OpenPanguConfig, tp: int) -> list[Part]:
    """Normed sink keys in BF16."""
    nbytes = (c.num_layers + c.num_mtp_layers) * c.num_sinks * c.num_kv_heads // tp * c.head_dim * 2
    copies = c.num_mtp_layers * c.vocab_size // tp * c.hidden_size * 2
    return [
        Part("derived weights", "derived", nbytes, "normed sink keys"),
        *([drafters_own("embedding", copies)] if copies else []),
    ]


def caches(c: OpenPanguConfig, load: Load, tp: int) -> list[Part]:
    return dense.kv_cache(c, c.num_layers + c.num_mtp_layers, load, tp)
