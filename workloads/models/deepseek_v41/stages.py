"""How DeepSeek-V4.1 is divided over pipeline stages. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace

from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.stages import Staged, stage_layers


def _part(c: DeepseekV41Config, layers: range, last: bool) -> DeepseekV41Config:
    """Parts of its tables of n-grams have sizes near those that they have in the whole model."""

    def renumbered(numbers: list[int]) -> list[int]:
        return [number - layers.start for number in numbers if number in layers]

    own = c.compress_ratios[layers.start : layers.stop]
    return replace(
        c,
        num_layers=len(layers),
        compress_ratios=own + (c.compress_ratios[c.num_layers :] if last else []),
        kv_source_layers=renumbered(c.kv_source_layers),
        index_source_layers=renumbered(c.index_source_layers),
        engram_layers=renumbered(c.engram_layers),
        num_dspark_layers=c.num_dspark_layers * last,
    )


def _problems(c: DeepseekV41Config, stages: int) -> Iterator[str]:
    if c.vision:
        yield "model.deepseek_v41.vision is true: what sees images is not divided into stages; set parallelism.pp=1."
    for stage in range(1, stages):
        cut = stage_layers(c.num_layers, stages, stage).start
        across = [
            f"layer {layer} needs what layer {source} makes"
            for layer in range(cut, c.num_layers)
            for source in (c.kv_source(layer), c.index_source(layer), _candidates(c, layer))
            if source is not None and source < cut
        ]
        if across:
            yield (
                f"parallelism.pp is {stages} and stage {stage} begins with layer {cut}: {across[0]}, and compressed "
                "keys and choices do not go from stage to stage; choose a number of stages that begin with sources "
                "of both, or set parallelism.pp=1."
            )


def _candidates(c: DeepseekV41Config, layer: int) -> int | None:
    """The layer whose filter an indexer of a layer follows."""
    filters = c.candidate_source_layer
    return filters if layer in c.index_source_layers and layer > filters else None


STAGED = Staged(
    layer="layers.",
    first=("embed.",),
    both=lambda c: c.num_dspark_layers > 0,
    part=_part,
    problems=_problems,
    derived_first=("first mix of one copy",),
)
