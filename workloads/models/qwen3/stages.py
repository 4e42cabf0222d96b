"""How Qwen3 is divided over pipeline stages. Imports no torch."""

from dataclasses import replace

from workloads.models.stages import Staged

STAGED = Staged(
    layer="model.layers.",
    first=("model.embed_tokens.",),
    both=lambda c: c.tie_word_embeddings,
    part=lambda c, layers, last: replace(c, num_layers=len(layers)),
    problems=lambda c, stages: iter(()),
)
