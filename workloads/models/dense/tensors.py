"""Checkpoint tensors of an ordinary decoder, as Llama names them. Imports no torch."""

from collections.abc import Iterator, Sequence

from workloads.loading.tensor_table import COLUMN, ROW, VOCAB, Row, Section, specs
from workloads.models.dense.config import DenseConfig


def decoder_sections(c: DenseConfig, prefix: str, extra: Sequence[Row] = ()) -> Iterator[Section]:
    """Embedding, layers, norm and head. extra: what attention has beside its projections, below its layer."""
    vocab = (c.vocab_size, c.hidden_size)
    yield Section(specs(prefix, "embedding", [Row("model.embed_tokens.weight", vocab, VOCAB)]), [])
    for layer in range(c.num_layers):
        here = f"{prefix}model.layers.{layer}."
        plain = specs(here, "norms", norm_rows(c)) + specs(here, "mlp", mlp_rows(c))
        yield Section(plain + specs(here, "attention", [*attention_rows(c), *extra]), [])
    norm = specs(prefix, "norms", [Row("model.norm.weight", (c.hidden_size,))])
    yield Section(norm + specs(prefix, "head", [Row("lm_head.weight", vocab, VOCAB)]), [])


def norm_rows(c: DenseConfig) -> list[Row]:
    names = ("input_layernorm", "post_attention_layernorm")
    return [Row(f"{name}.weight", (c.hidden_size,)) for name in names]


def attention_rows(c: DenseConfig) -> list[Row]:
    h, queries, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return [
        Row("self_attn.q_proj.weight", (queries, h), COLUMN),
        Row("self_attn.k_proj.weight", (keys, h), COLUMN),
        Row("self_attn.v_proj.weight", (keys, h), COLUMN),
        Row("self_attn.o_proj.weight", (h, queries), ROW),
    ]


def mlp_rows(c: DenseConfig) -> list[Row]:
    h, inner = c.hidden_size, c.intermediate_size
    return [
        Row("mlp.gate_proj.weight", (inner, h), COLUMN),
        Row("mlp.up_proj.weight", (inner, h), COLUMN),
        Row("mlp.down_proj.weight", (h, inner), ROW),
    ]
