"""Every checkpoint tensor of a DeepSeek-V4 stack: name, dtype, shape, how it is split, which part of the model it is.

Imports no torch. Names have no common prefix, as published; matrices in FP8 have a `.scale` of E8M0 for every block of
128 x 128 values, routed experts are two FP4 values to an int8 with a `.scale` for every 32.
"""

from collections.abc import Iterator

from workloads.loading.tensor_table import (
    COLUMN,
    EXPERT,
    MXFP4_GROUP,
    REPLICATED,
    ROW,
    VOCAB,
    Quantized,
    Row,
    Section,
    Shard,
    specs,
)
from workloads.models.deepseek_v4.config import DeepseekV4Config, Dimensions

NOT_LOADED = ("vision.",)  # the tower, whose output `workloads.models.tower` stands in for
ALIGNER = "aligner."
MARKOV = ("markov_w1", "markov_w2")
FP8_BLOCK = 128
FP8 = f"fp8_e8m0_block{FP8_BLOCK}"


def sections(c: DeepseekV4Config) -> Iterator[Section]:
    """The whole checkpoint, layer by layer."""
    vocab = (c.vocab_size, c.hidden_size)
    yield Section(specs("", "embedding", [Row("embed.weight", vocab, VOCAB)]), [])
    for layer in range(c.num_layers):
        yield _layer(c, layer, f"layers.{layer}.")
    tail = specs("", "hyper_connections", _hc_head(c)) + specs("", "norms", [norm("norm", c.hidden_size)])
    yield Section(tail + specs("", "head", [Row("head.weight", vocab, VOCAB)]), [])
    for block in range(c.num_mtp_layers):
        yield _mtp(c, block)
    for stage in range(c.num_dspark_layers):
        yield _dspark(c, stage)
    if c.vision:
        yield aligner(c.vision_hidden_size, c.hidden_size)


def _layer(c: DeepseekV4Config, layer: int, prefix: str, component: str | None = None) -> Section:
    """A decoder layer. component: what all of it counts as; by default each part counts by itself."""
    h = c.hidden_size
    parts = {
        "norms": [norm("attn_norm", h), norm("ffn_norm", h)],
        "hyper_connections": [*hyper_connection(c, "hc_attn"), *hyper_connection(c, "hc_ffn")],
        "attention": attention(c),
        "compressors": _compressors(c, layer),
        "router": _router(c, layer),
        "shared_experts": shared_experts(c),
    }
    plain = [spec for name, rows in parts.items() for spec in specs(prefix, component or name, rows)]
    return Section(plain, specs(prefix, component or "routed_experts", expert(c)), c.num_experts)


def _mtp(c: DeepseekV4Config, block: int) -> Section:
    """A drafter block: a decoder layer with its own input projections, collapse and norm."""
    h, prefix = c.hidden_size, f"mtp.{block}."
    layer = _layer(c, c.num_layers + block, prefix, "mtp")
    rows = [
        *fp8("e_proj", h, h),
        *fp8("h_proj", h, h),
        *(norm(name, h) for name in ("enorm", "hnorm", "norm")),
        *_hc_head(c),
    ]
    return Section(specs(prefix, "mtp", rows) + layer.plain, layer.templates, layer.experts)


def _dspark(c: DeepseekV4Config, stage: int) -> Section:
    """A stage of the DSpark drafter: a decoder layer; the first projects the target's states, the last makes proposals.
    Its Markov and confidence heads are replicated."""
    prefix = f"mtp.{stage}."
    layer, rows = _layer(c, c.num_layers + stage, prefix, "dspark"), dspark_rows(c, stage, MARKOV)
    if stage == c.num_dspark_layers - 1:
        rows += _hc_head(c)
    return Section(specs(prefix, "dspark", rows) + layer.plain, layer.templates, layer.experts)


def dspark_rows(c: Dimensions, stage: int, markov: tuple[str, str], block: int = FP8_BLOCK) -> list[Row]:
    """What a stage of the drafter has beside a layer. markov: names of the two matrices of its Markov head."""
    h, rank, rows = c.hidden_size, c.dspark_markov_rank, []
    if stage == 0:
        taps = len(c.dspark_target_layer_ids)
        rows += [*fp8("main_proj", h, taps * h, block=block), norm("main_norm", h)]
    if stage == c.num_dspark_layers - 1:
        rows += [
            norm("norm", h),
            *(Row(f"markov_head.{name}.weight", (c.vocab_size, rank)) for name in markov),
            Row("confidence_head.proj.weight", (1, h + rank)),
        ]
    return rows


def aligner(width: int, hidden: int) -> Section:
    """From the width of the tower that sees images to the language model's."""
    rows = [norm("norm", width), Row("proj.weight", (hidden, width))]
    return Section(specs(ALIGNER, "vision", rows), [])


def fp8(stem: str, rows: int, columns: int, shard: Shard = REPLICATED, block: int = FP8_BLOCK) -> list[Row]:
    """A matrix in FP8 with its scales."""
    form = f"fp8_e8m0_block{block}"
    weight, scale = (Quantized(form, piece, stem, (rows, columns)) for piece in ("weight", "scale"))
    blocks = -(-rows // block), -(-columns // block)
    return [
        Row(f"{stem}.weight", (rows, columns), shard, "F8_E4M3", quantized=weight),
        Row(f"{stem}.scale", blocks, shard, "F8_E8M0", quantized=scale),
    ]


def norm(name: str, size: int) -> Row:
    return Row(f"{name}.weight", (size,))


def hyper_connection(c: Dimensions, stem: str) -> list[Row]:
    """Of one sublayer: projection of all copies to the coefficients, their scales and offsets."""
    mixes = (2 + c.hc_mult) * c.hc_mult
    return _float_rows(stem, (mixes, c.hc_mult * c.hidden_size), 3)


def _hc_head(c: DeepseekV4Config) -> list[Row]:
    return _float_rows("hc_head", (c.hc_mult, c.hc_mult * c.hidden_size), 1)


def _float_rows(stem: str, shape: tuple[int, int], scales: int) -> list[Row]:
    sizes = {"fn": shape, "base": shape[:1], "scale": (scales,)}
    return [Row(f"{stem}_{name}", size, REPLICATED, "F32") for name, size in sizes.items()]


def attention(c: Dimensions, block: int = FP8_BLOCK) -> list[Row]:
    """What every layer has, whether it compresses or not."""
    h, width, ranks = c.hidden_size, c.num_heads * c.head_dim, c.o_groups * c.o_lora_rank
    return [
        *fp8("attn.wq_a", c.q_lora_rank, h, block=block),
        norm("attn.q_norm", c.q_lora_rank),
        *fp8("attn.wq_b", width, c.q_lora_rank, COLUMN, block),
        *fp8("attn.wkv", c.head_dim, h, block=block),
        norm("attn.kv_norm", c.head_dim),
        *fp8("attn.wo_a", ranks, width // c.o_groups, COLUMN, block),
        *fp8("attn.wo_b", h, ranks, ROW, block),
        Row("attn.attn_sink", (c.num_heads,), COLUMN, "F32"),
    ]


def _compressors(c: DeepseekV4Config, layer: int) -> list[Row]:
    """What a layer has that attends to compressed groups. It is replicated: every rank chooses the same groups."""
    ratio = c.compress_ratios[layer]
    if not ratio:
        return []
    if not c.indexed(layer):
        return _compressor(c, "attn.", ratio, c.head_dim)
    d = c.index_head_dim
    return [
        *_compressor(c, "attn.", 2 * ratio, 2 * c.head_dim, ratio),
        *fp8("attn.indexer.wq_b", c.index_num_heads * d, c.q_lora_rank),
        Row("attn.indexer.weights_proj.weight", (c.index_num_heads, c.hidden_size)),
        *_compressor(c, "attn.indexer.", 2 * ratio, 2 * d, ratio),
    ]


def _compressor(
    c: DeepseekV4Config, stem: str, candidates: int, width: int, ratio: int | None = None
) -> list[Row]:
    """candidates: tokens that an entry pools; width: channels projected for each; ratio: tokens in a group, where
    groups overlap."""
    base = f"{stem}compressor."
    return [
        Row(f"{base}wkv.weight", (width, c.hidden_size)),
        Row(f"{base}wgate.weight", (width, c.hidden_size)),
        norm(f"{base}norm", width // (candidates // (ratio or candidates))),
        Row(f"{base}ape", (ratio or candidates, width), REPLICATED, "F32"),
    ]


def _router(c: DeepseekV4Config, layer: int) -> list[Row]:
    gate = Row("ffn.gate.weight", (c.num_experts, c.hidden_size))
    if c.hashed(layer):
        shape = (c.vocab_size, c.num_experts_per_token)
        return [gate, Row("ffn.gate.tid2eid", shape, REPLICATED, "I64", below=c.num_experts)]
    return [gate, Row("ffn.gate.bias", (c.num_experts,), REPLICATED, "F32")]


def shared_experts(c: Dimensions, block: int = FP8_BLOCK) -> list[Row]:
    """The shared experts: w1 gate, w2 down, w3 up."""
    h, inner, stem = c.hidden_size, c.shared_intermediate_size, "ffn.shared_experts."
    shapes = {"w1": (inner, h), "w2": (h, inner), "w3": (inner, h)}
    return [row for name, shape in shapes.items() for row in fp8(stem + name, *shape, block=block)]


def expert(c: Dimensions) -> list[Row]:
    """Tensors of one routed expert: w1 gate, w2 down, w3 up."""
    h, inner, rows = c.hidden_size, c.moe_intermediate_size, []
    for name, (out, width) in {"w1": (inner, h), "w2": (h, inner), "w3": (inner, h)}.items():
        stem = f"ffn.experts.*.{name}"
        if c.expert_quantization == "fp8":
            rows += fp8(stem, out, width, EXPERT)
            continue
        weight, scale = (Quantized("mxfp4_i8", piece, stem, (out, width)) for piece in ("weight", "scale"))
        rows.append(Row(f"{stem}.weight", (out, width // 2), EXPERT, "I8", quantized=weight))
        rows.append(Row(f"{stem}.scale", (out, width // MXFP4_GROUP), EXPERT, "F8_E8M0", quantized=scale))
    return rows
