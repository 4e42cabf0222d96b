"""How DeepSeek-V4 is divided over pipeline stages. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace

from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.stages import Staged


def _part(c: DeepseekV4Config, layers: range, last: bool) -> DeepseekV4Config:
    own = c.compress_ratios[layers.start : layers.stop]
    return replace(
        c,
        num_layers=len(layers),
        compress_ratios=own + (c.compress_ratios[c.num_layers :] if last else []),
        num_hash_layers=len(range(layers.start, min(layers.stop, c.num_hash_layers))),
        num_mtp_layers=c.num_mtp_layers * last,
        num_dspark_layers=c.num_dspark_layers * last,
    )


def _problems(c: DeepseekV4Config, stages: int) -> Iterator[str]:
    if c.vision:
        yield "model.deepseek_v4.vision is true: what sees images is not divided into stages; set parallelism.pp=1."


STAGED = Staged(
    layer="layers.",
    first=("embed.",),
    both=lambda c: c.num_mtp_layers + c.num_dspark_layers > 0,
    part=_part,
    problems=_problems,
    derived_first=("first mix of one copy", "drafter's embedding"),
)
