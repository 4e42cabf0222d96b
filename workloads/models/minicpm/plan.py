"""What a MiniCPM stack needs beside its weights. Imports no torch."""

from collections.abc import Iterator, Mapping

from workloads.models.dense import plan as dense
from workloads.models.media import slot_problems
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.planning import Experts, Load, Part

COMPONENTS = {**dense.COMPONENTS, "resampler": "resampler", "audio": "audio projector"}
MAY_BE_ZERO: tuple[str, ...] = ()


def problems(c: MiniCpmConfig) -> Iterator[str]:
    yield from dense.decoder_problems(c, "minicpm")
    if c.hidden_size % 4:
        yield (
            f"model.minicpm.hidden_size is {c.hidden_size}; the resampler's positions take a quarter of the channels "
            "each for sine and cosine of row and column, so it must be a multiple of 4."
        )
    if c.hidden_size % c.resampler_heads:
        yield (
            f"model.minicpm.resampler_heads is {c.resampler_heads}, which does not divide the hidden_size "
            f"{c.hidden_size} between the resampler's heads."
        )
    yield from _images(c)
    keys = "image_token_start, num_queries, audio_frames and audio_pool"
    lengths = [len(ids) for ids in (*c.image_slots, *c.audio_slots)]
    yield from slot_problems("minicpm", keys, c.image_token_start, lengths, c.vocab_size)


def _images(c: MiniCpmConfig) -> Iterator[str]:
    if len(c.image_heights) != len(c.image_widths):
        yield (
            f"model.minicpm.image_heights has {len(c.image_heights)} entries and image_widths {len(c.image_widths)}: "
            "every image has one of each."
        )
    for key in ("image_heights", "image_widths"):
        outside = [size for size in getattr(c, key) if not 1 <= size <= c.resampler_max_size]
        if outside:
            yield (
                f"model.minicpm.{key} holds {outside}; the table of positions knows sides of 1 to "
                f"{c.resampler_max_size} patches (resampler_max_size)."
            )


def divided(c: MiniCpmConfig) -> Mapping[str, int]:
    return dense.decoder_divided(c)


def experts(c: MiniCpmConfig) -> Experts | None:
    return None


def derived(c: MiniCpmConfig, tp: int) -> list[Part]:
    """The resampler's positions in FP32."""
    nbytes = c.resampler_max_size**2 * c.hidden_size * 4
    side = c.resampler_max_size
    return [Part("derived weights", "derived", nbytes, f"positions of {side}x{side} patches")]


def caches(c: MiniCpmConfig, load: Load, tp: int) -> list[Part]:
    return dense.kv_cache(c, c.num_layers, load, tp)
