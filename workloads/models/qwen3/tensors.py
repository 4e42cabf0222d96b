"""Every checkpoint tensor of a Qwen3 stack: name, dtype, shape, how it is split, which part of the model it is.

Imports no torch. Names and shapes are those of the published checkpoints; NVFP4 as ModelOpt writes it, without scales
of the KV cache.
"""

from collections.abc import Iterator

from workloads.loading.tensor_table import (
    COLUMN,
    EXPERT,
    REPLICATED,
    ROW,
    VOCAB,
    Quantized,
    Row,
    Section,
    Shard,
    specs,
)
from workloads.models.qwen3.config import Qwen3Config
from workloads.models.qwen3.formats import FORMATS, SCALAR

NOT_LOADED = ("lm_head.",)  # published beside the embedding even where the two are tied
_EXPERT_COLUMN, _EXPERT_ROW = Shard("expert", tensor_dim=0), Shard("expert", tensor_dim=1)


def sections(c: Qwen3Config) -> Iterator[Section]:
    """The whole checkpoint, layer by layer."""
    vocabulary = (c.vocab_size, c.hidden_size)
    yield Section(specs("model.", "embedding", [Row("embed_tokens.weight", vocabulary, VOCAB)]), [])
    for layer in range(c.num_layers):
        yield _layer(c, f"model.layers.{layer}.")
    tail = specs("model.", "norms", [Row("norm.weight", (c.hidden_size,))])
    if not c.tie_word_embeddings:
        tail += specs("", "head", [Row("lm_head.weight", vocabulary, VOCAB)])
    yield Section(tail, [])


def _layer(c: Qwen3Config, prefix: str) -> Section:
    plain = specs(prefix, "norms", _norms(c)) + specs(prefix, "attention", _attention(c))
    if not c.num_experts:
        return Section(plain + specs(prefix, "mlp", _mlp(c, "mlp.", COLUMN, ROW)), [])
    router = Row("mlp.gate.weight", (c.num_experts, c.hidden_size))
    expert = _mlp(c, "mlp.experts.*.", _EXPERT_COLUMN, _EXPERT_ROW)
    return Section(
        plain + specs(prefix, "router", [router]), specs(prefix, "routed_experts", expert), c.num_experts
    )


def _norms(c: Qwen3Config) -> list[Row]:
    widths = {
        "input_layernorm": c.hidden_size,
        "post_attention_layernorm": c.hidden_size,
        "self_attn.q_norm": c.head_dim,
        "self_attn.k_norm": c.head_dim,
    }
    return [Row(f"{name}.weight", (width,)) for name, width in widths.items()]


def _attention(c: Qwen3Config) -> list[Row]:
    query, key = c.num_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = [
        row
        for name, width in (("q", query), ("k", key), ("v", key))
        for row in _matrix(c, f"self_attn.{name}_proj", width, c.hidden_size, COLUMN)
    ]
    return rows + _matrix(c, "self_attn.o_proj", c.hidden_size, query, ROW)


def _mlp(c: Qwen3Config, stem: str, column: Shard, row: Shard) -> list[Row]:
    """The MLP of a dense layer, or one expert."""
    return [
        *_matrix(c, f"{stem}gate_proj", c.intermediate, c.hidden_size, column),
        *_matrix(c, f"{stem}up_proj", c.intermediate, c.hidden_size, column),
        *_matrix(c, f"{stem}down_proj", c.hidden_size, c.intermediate, row),
    ]


def _matrix(c: Qwen3Config, stem: str, rows: int, columns: int, shard: Shard) -> list[Row]:
    """The tensors of one matrix in the model's format. Every rank of a matrix holds its scalars."""
    form = FORMATS[c.quantization]
    whole = EXPERT if shard.kind == "expert" else REPLICATED
    return [
        Row(
            f"{stem}.{stored.name}",
            stored.shape(rows, columns),
            whole if stored.rows == SCALAR else shard,
            stored.dtype,
            quantized=Quantized(form.generator, stored.piece, stem, (rows, columns))
            if stored.piece
            else None,
        )
        for stored in form.stored
    ]
