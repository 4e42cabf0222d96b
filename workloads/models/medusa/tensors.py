"""Every checkpoint tensor of a target and its Medusa heads. Imports no torch.

The heads have their published names below `medusa_heads.`, where they stand beside the target's tensors.
"""

from collections.abc import Iterator

from workloads.loading.tensor_table import VOCAB, Row, Section, specs
from workloads.models.dense.tensors import decoder_sections
from workloads.models.medusa.config import MedusaConfig

NOT_LOADED: tuple[str, ...] = ()
PREFIX = "medusa_heads."


def sections(c: MedusaConfig) -> Iterator[Section]:
    yield from decoder_sections(c, "")
    h = c.hidden_size
    layers = [(head, layer) for head in range(c.num_draft_heads) for layer in range(c.num_draft_layers)]
    rows = [Row(f"blocks.{head}.layers.{layer}.weight", (h, h)) for head, layer in layers]
    rows += [Row(f"lm_heads.{head}.weight", (c.draft_vocab_size, h), VOCAB) for head in range(c.output_heads)]
    if c.draft_vocab_size < c.vocab_size:
        rows.append(Row("token_map", (c.draft_vocab_size,), dtype="I64", below=c.vocab_size))
    yield Section(specs(PREFIX, "draft", rows), [])
