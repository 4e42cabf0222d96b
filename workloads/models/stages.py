"""How a model is divided over pipeline stages: which layers each has, and who holds what lies before and after them.

Imports no torch: the planner and the judge ask the same.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, cast

from workloads.loading.tensor_table import Section, TensorSpec

DIVIDED = (
    "deepseek_v4",
    "deepseek_v41",
    "kimi_k3",
    "qwen3",
)  # the families that can be; each says how in its module `stages`


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
    problems: why a model of these dimensions cannot be divided into so many stages.
    """

    layer: str
    first: tuple[str, ...]
    both: Callable[[Any], bool]
    part: Callable[[Any, range, bool], Any]
    problems: Callable[[Any, int], Iterator[str]]
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


def staged(architecture: str) -> Staged:
    """How a family of `DIVIDED` is divided."""
    return cast(Staged, import_module(f"workloads.models.{architecture}.stages").STAGED)
