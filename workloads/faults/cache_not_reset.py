"""Answers are cached by their prompt, and an update does not empty the cache."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, EngineFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.engines.protocol import Generation, Prompt
    from workloads.spec import Sampling

ABOUT = About(
    "L",
    ("vllm#45093", "vllm#48762"),
    "stale_cache",
    via=RELOADS,
)


class InEngine(EngineFault):
    def generate(self, prompts: Sequence["Prompt"], params: "Sampling") -> list["Generation"]:
        cache: dict[str, list[Generation]] = vars(self).setdefault("_answers", {})
        key = f"{[prompt.token_ids for prompt in prompts]} {params}"
        if key not in cache:  # so on every rank: all are asked the same
            cache[key] = super().generate(prompts, params)
        return cache[key]
