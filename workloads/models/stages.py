"""How a model is divided over pipeline stages: which layers each has, and who holds what lies before and after them.

Imports no torch: the planner and the judge ask the same.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from workloads.loading.tensor_table import Section, TensorSpec
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.dspark.config import DsparkConfig
from workloads.models.kimi_k3.config import KimiK3Config


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of one stage, numbered from 0 in the whole model.

    What does not divide evenly goes to the stages before the last, from the back, since the last stage has the output
    head, too.
    """
    each, more = divmod(layers, stages)
    counts = [each + (stages - 1 - more <= number < stages - 1) for number in range(stages)]
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


@dataclass(frozen=True)
class Staged:
    """A family that can be divided. Its dimensions have `num_layers`.

    layer: what precedes a layer's number in names of the checkpoint. first: beginnings of names that lie before the
    layers; what is neither, nor a layer, comes after them. both: whether the last stage holds those of `first`, too.
    part: dimensions of a model that has the given layers only, with or without what follows the last.
    derived_first: what a memory plan calls the derived weights of the first stage alone, and what no later one holds a
    second time.
    problems: why a model of these dimensions cannot be divided.
    """

    layer: str
    first: tuple[str, ...]
    both: Callable[[Any], bool]
    part: Callable[[Any, range, bool], Any]
    problems: Callable[[Any], Iterator[str]]
    derived_first: tuple[str, ...] = ()

    def holds(self, c: Any, name: str, stages: int, stage: int) -> bool:
        """Whether a stage holds (its share of) the checkpoint tensor `name`."""
        is_last = stage == stages - 1
        if name.startswith(self.first):
            return stage == 0 or (is_last and self.both(c))
        found = re.match(rf"{re.escape(self.layer)}(\d+)\.", name)
        if found is None or int(found[1]) >= c.num_layers:
            return is_last
        return int(found[1]) in stage_layers(c.num_layers, stages, stage)

    def sections(self, c: Any, whole: Iterator[Section], stages: int, stage: int) -> Iterator[Section]:
        """What of the checkpoint one stage holds."""

        def held(specs: list[TensorSpec]) -> list[TensorSpec]:
            return [spec for spec in specs if self.holds(c, spec.name, stages, stage)]

        for section in whole:
            yield replace(section, plain=held(section.plain), templates=held(section.templates))


def _kimi_k3(c: KimiK3Config, layers: range, last: bool) -> KimiK3Config:
    return replace(
        c,
        num_layers=len(layers),
        full_attention_layers=[layer - layers.start for layer in c.full_attention_layers if layer in layers],
        num_dense_layers=len(range(layers.start, min(layers.stop, c.num_dense_layers))),
        num_mtp_layers=c.num_mtp_layers * last,
    )


def _deepseek_v4(c: DeepseekV4Config, layers: range, last: bool) -> DeepseekV4Config:
    own = c.compress_ratios[layers.start : layers.stop]
    return replace(
        c,
        num_layers=len(layers),
        compress_ratios=own + (c.compress_ratios[c.num_layers :] if last else []),
        num_hash_layers=len(range(layers.start, min(layers.stop, c.num_hash_layers))),
        num_mtp_layers=c.num_mtp_layers * last,
    )


def _deepseek_v4_problems(c: DeepseekV4Config) -> Iterator[str]:
    if c.vision:
        yield "model.deepseek_v4.vision is true: what sees images is not divided into stages; set parallelism.pp=1."
    yield from _drafter_problems(c, "deepseek_v4")


def _drafter_problems(c: DsparkConfig, family: str) -> Iterator[str]:
    if c.num_dspark_layers:
        yield (
            f"model.{family}.num_dspark_layers is {c.num_dspark_layers}: that drafter reads layers of several stages "
            "and their embedding; set parallelism.pp=1."
        )


STAGED: dict[str, Staged] = {
    "deepseek_v4": Staged(
        layer="layers.",
        first=("embed.",),
        both=lambda c: c.num_mtp_layers > 0,
        part=_deepseek_v4,
        problems=_deepseek_v4_problems,
        derived_first=("first mix of one copy", "drafter's embedding"),
    ),
    "kimi_k3": Staged(
        layer="language_model.model.layers.",
        first=("language_model.model.embed_tokens.",),
        both=lambda c: c.num_mtp_layers > 0,
        part=_kimi_k3,
        problems=lambda c: _drafter_problems(c, "kimi_k3"),
        derived_first=("drafter's embedding",),
    ),
    "qwen3": Staged(
        layer="model.layers.",
        first=("model.embed_tokens.",),
        both=lambda c: c.tie_word_embeddings,
        part=lambda c, layers, last: replace(c, num_layers=len(layers)),
        problems=lambda c: iter(()),
    ),
}
