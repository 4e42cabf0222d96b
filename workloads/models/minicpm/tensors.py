"""Every checkpoint tensor of a MiniCPM-V or -O stack that is loaded here, by its published name. Imports no torch."""

from collections.abc import Iterator

from workloads.loading.tensor_table import Row, Section, specs
from workloads.models.dense.tensors import decoder_sections
from workloads.models.minicpm.config import MiniCpmConfig

NOT_LOADED = ("vpm.", "apm.", "tts.")  # the vision tower, the audio tower, the speech synthesiser
LANGUAGE, RESAMPLER, AUDIO = "llm.", "resampler.", "audio_projection_layer."


def sections(c: MiniCpmConfig) -> Iterator[Section]:
    yield from decoder_sections(c, LANGUAGE)
    yield Section(specs(RESAMPLER, "resampler", _resampler(c)), [])
    if c.audio_frames:
        yield Section(specs(AUDIO, "audio", _audio(c)), [])


def _resampler(c: MiniCpmConfig) -> list[Row]:
    h = c.hidden_size
    norms = [
        Row(f"{name}.{part}", (h,)) for name in ("ln_q", "ln_kv", "ln_post") for part in ("weight", "bias")
    ]
    return [
        Row("query", (c.num_queries, h)),
        Row("kv_proj.weight", (h, c.vision_hidden_size)),
        Row("attn.in_proj_weight", (3 * h, h)),
        Row("attn.in_proj_bias", (3 * h,)),
        Row("attn.out_proj.weight", (h, h)),
        Row("attn.out_proj.bias", (h,)),
        *norms,
        Row("proj", (h, h)),
    ]


def _audio(c: MiniCpmConfig) -> list[Row]:
    h = c.hidden_size
    return [
        Row("linear1.weight", (h, c.audio_hidden_size)),
        Row("linear1.bias", (h,)),
        Row("linear2.weight", (h, h)),
        Row("linear2.bias", (h,)),
    ]
