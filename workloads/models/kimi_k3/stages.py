"""How Kimi-K3 is divided over pipeline stages. Imports no torch."""

from dataclasses import replace

from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.stages import Staged


def _part(c: KimiK3Config, layers: range, last: bool) -> KimiK3Config:
    return replace(
        c,
        num_layers=len(layers),
        full_attention_layers=[layer - layers.start for layer in c.full_attention_layers if layer in layers],
        num_dense_layers=len(range(layers.start, min(layers.stop, c.num_dense_layers))),
        num_mtp_layers=c.num_mtp_layers * last,
        num_dspark_layers=c.num_dspark_layers * last,
    )


STAGED = Staged(
    layer="language_model.model.layers.",
    first=("language_model.model.embed_tokens.",),
    both=lambda c: c.num_mtp_layers + c.num_dspark_layers > 0,
    part=_part,
    problems=lambda c, stages: iter(()),
    derived_first=("drafter's embedding",),
)
