"""Every checkpoint tensor of a DeepSeek-V4.1 stack: name, dtype, shape, how it is split, which part of the model it is.

Imports no torch. Names are those of DeepSeek-V4; matrices in FP8 have a `.scale` of E8M0 for every block of 32 x 32
values, tables of n-grams one for every 32 values of a row.
"""

from collections.abc import Iterator

from workloads.loading.tensor_table import (
    COLUMN,
    MXFP4_GROUP,
    REPLICATED,
    ROW,
    VOCAB,
    Quantized,
    Row,
    Section,
    specs,
)
from workloads.models.deepseek_v4.tensors import (
    aligner,
    attention,
    dspark_rows,
    expert,
    fp8,
    hyper_connection,
    norm,
    shared_experts,
)
from workloads.models.deepseek_v41.config import FP8_BLOCK, DeepseekV41Config
from workloads.models.deepseek_v41.hashing import head_sizes

# The tower and the projector of images, and the stages of the DSpark drafter, where the model is without them.
NOT_LOADED = ("vision.", "aligner.", "image_", "mtp.")
MARKOV = ("embed", "head")


def sections(c: DeepseekV41Config) -> Iterator[Section]:
    """The whole checkpoint, layer by layer."""
    vocab = (c.vocab_size, c.hidden_size)
    yield Section(specs("", "embedding", [Row("embed.weight", vocab, VOCAB)]), [])
    for layer in range(c.num_layers):
        yield _layer(c, layer, f"layers.{layer}.")
    tail = specs("", "norms", [norm("norm", c.hidden_size)])
    yield Section(tail + specs("", "head", [Row("head.weight", vocab, VOCAB)]), [])
    for stage in range(c.num_dspark_layers):
        yield _dspark(c, stage)
    if c.vision:
        yield aligner(c.vision_hidden_size, c.hidden_size)


def _dspark(c: DeepseekV41Config, stage: int) -> Section:
    """A stage of the DSpark drafter: a decoder layer; the first projects the target's states, the last makes proposals.
    Its Markov and confidence heads are replicated."""
    prefix = f"mtp.{stage}."
    layer = _layer(c.of_drafter(), c.num_layers + stage, prefix, "dspark")
    rows = dspark_rows(c, stage, MARKOV, FP8_BLOCK)
    return Section(specs(prefix, "dspark", rows) + layer.plain, layer.templates, layer.experts)


def _layer(c: DeepseekV41Config, layer: int, prefix: str, component: str | None = None) -> Section:
    """A decoder layer. component: what all of it counts as; by default each part counts by itself."""
    h = c.hidden_size
    parts = {
        "engram": _engram(c, layer),
        "norms": [norm("attn_norm", h), norm("ffn_norm", h)],
        "hyper_connections": [*hyper_connection(c, "hc_attn"), *hyper_connection(c, "hc_ffn")],
        "attention": attention(c, FP8_BLOCK),
        "compressors": [*_compressor(c, layer), *_indexer(c, layer)],
        "router": _router(c),
        "shared_experts": shared_experts(c, FP8_BLOCK),
    }
    plain = [spec for name, rows in parts.items() for spec in specs(prefix, component or name, rows)]
    return Section(plain, specs(prefix, component or "routed_experts", expert(c)), c.num_experts)


def _engram(c: DeepseekV41Config, layer: int) -> list[Row]:
    """Parts of a table, one after the other, which ranks share head by head; keys of all copies and one value of what
    is found; weights of the norms of copies and keys."""
    if layer not in c.engram_layers:
        return []
    h, dim, stem = c.hidden_size, c.engram_head_dim, "engram.embed"
    shape = sum(head_sizes(c, layer)), dim
    weight, scale = (Quantized("fp8_e8m0_rows32", piece, stem, shape) for piece in ("weight", "scale"))
    copies = (c.hc_mult, h)
    return [
        Row(f"{stem}.weight", shape, COLUMN, "F8_E4M3", quantized=weight),
        Row(f"{stem}.scale", (shape[0], dim // MXFP4_GROUP), COLUMN, "F8_E8M0", quantized=scale),
        *fp8("engram.wkv", (c.hc_mult + 1) * h, c.engram_heads * dim, ROW, FP8_BLOCK),
        Row("engram.q_weight", copies),
        Row("engram.k_weight", copies),
    ]


def _compressor(c: DeepseekV41Config, layer: int) -> list[Row]:
    """Of a layer whose keys others use as well. It is replicated: every rank makes the same keys."""
    if layer not in c.kv_source_layers:
        return []
    shape = (c.head_dim, c.hidden_size)
    names = ("wkv",) if c.compress_ratios[layer] == 1 else ("wkv", "wgate")
    rows = [Row(f"attn.compressor.{name}.weight", shape) for name in names]
    return [*rows, norm("attn.compressor.norm", c.head_dim)]


def _indexer(c: DeepseekV41Config, layer: int) -> list[Row]:
    """Of a layer that chooses among the keys; those that make keys make the indexer's, too."""
    if layer not in c.index_source_layers:
        return []
    d, stem = c.index_head_dim, "attn.indexer."
    rows = [
        *fp8(f"{stem}wq_b", c.index_num_heads * d, c.q_lora_rank, REPLICATED, FP8_BLOCK),
        Row(f"{stem}weights_proj.weight", (c.index_num_heads, c.hidden_size)),
    ]
    if layer in c.kv_source_layers:
        rows += [Row(f"{stem}wk.weight", (d, c.head_dim)), norm(f"{stem}k_norm", d)]
    return rows


def _router(c: DeepseekV41Config) -> list[Row]:
    """The second bias is for tokens of images."""
    biases = [Row(f"ffn.gate.{name}", (c.num_experts,), REPLICATED, "F32") for name in ("bias", "bias_vl")]
    return [Row("ffn.gate.weight", (c.num_experts, c.hidden_size)), *biases]
