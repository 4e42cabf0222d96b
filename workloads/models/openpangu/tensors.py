"""Every checkpoint tensor of an OpenPangu stack. Imports no torch.

Sinks and the norm of keys have their published names and shapes. The rest is the plain form, named as Llama names it,
since no published checkpoint of a model with sinks could be read: separate projections, and an MTP block and a
projector of images named as other models name theirs.
"""

from collections.abc import Iterator

from workloads.loading.tensor_table import VOCAB, Row, Section, Shard, specs
from workloads.models.dense.tensors import attention_rows, decoder_sections, mlp_rows, norm_rows
from workloads.models.openpangu.config import OpenPanguConfig

NOT_LOADED = ("visual.blocks.", "visual.patch_embed.")  # the tower before the projector
PROJECTOR = "visual.merger."
KV_HEADS = Shard("tensor", 1)


def sections(c: OpenPanguConfig) -> Iterator[Section]:
    yield from decoder_sections(c, c.prefix, _sinks(c))
    h = c.hidden_size
    for block in range(c.num_mtp_layers):
        rows = [
            Row("enorm.weight", (h,)),
            Row("hnorm.weight", (h,)),
            Row("eh_proj.weight", (h, 2 * h)),
            *norm_rows(c),
            *attention_rows(c),
            *_sinks(c),
            *mlp_rows(c),
            Row("shared_head.norm.weight", (h,)),
            Row("shared_head.head.weight", (c.vocab_size, h), VOCAB),
        ]
        yield Section(specs(f"{c.prefix}model.layers.{c.num_layers + block}.", "mtp", rows), [])
    if c.vision:
        rows = [
            Row("norm.weight", (c.vision_hidden_size,)),
            Row("proj.weight", (h, c.vision_hidden_size)),
        ]
        yield Section(specs(PROJECTOR, "vision", rows), [])


def _sinks(c: OpenPanguConfig) -> list[Row]:
    shape = (c.num_sinks, c.num_kv_heads, c.head_dim)
    return [
        Row("self_attn.k_layernorm.weight", (c.head_dim,)),
        Row("self_attn.param_sink_key", shape, KV_HEADS),
        Row("self_attn.param_sink_value", shape, KV_HEADS),
    ]
