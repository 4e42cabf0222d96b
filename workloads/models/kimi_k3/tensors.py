"""Every checkpoint tensor of a Kimi-K3 stack: name, dtype, shape, how it is split, which part of the model it is.

Imports no torch. Names, shapes and dtypes are those of the published checkpoint's headers, whose text tensors this
table reproduces to the byte.
"""

from collections.abc import Iterator
from itertools import chain

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
    specs,
)
from workloads.models.kimi_k3.config import KimiK3Config

PREFIX = "language_model."
# Prefixes of tensors published beside those that serve: the towers; of the DSpark drafter its copy of the target's
# embedding, and a head that schedules its training.
NOT_LOADED = ("vision_tower.", "mm_projector.", "embed_tokens.", "confidence_head.")


def sections(c: KimiK3Config) -> Iterator[Section]:
    """The whole checkpoint, layer by layer.

    Raises ValueError when a width of the experts is not a whole number of scale groups.
    """
    hidden, vocab = (c.hidden_size,), (c.vocab_size, c.hidden_size)
    yield Section(specs(PREFIX, "embedding", [Row("model.embed_tokens.weight", vocab, VOCAB)]), [])
    for layer in range(c.num_layers):
        yield _decoder_layer(c, layer)
    tail = specs(PREFIX + "model.", "norms", [*_mixer(c, "output_attn_res"), Row("norm.weight", hidden)])
    yield Section(tail + specs(PREFIX, "head", [Row("lm_head.weight", vocab, VOCAB)]), [])
    for block in range(c.num_mtp_layers):
        yield _mtp_block(c, c.num_layers + block)
    if c.num_dspark_layers:
        yield _dspark(c)


def _decoder_layer(c: KimiK3Config, layer: int) -> Section:
    prefix = f"{PREFIX}model.layers.{layer}."
    mixers = [*_mixer(c, "self_attention_res"), *_mixer(c, "mlp_res")]
    plain = specs(prefix, "norms", [*_layer_norms(c), *mixers])
    plain += (
        specs(prefix, "mla", _mla(c, c.num_heads))
        if c.is_full_attention(layer)
        else specs(prefix, "kda", _kda(c))
    )
    if c.is_dense(layer):
        mlp = _mlp("mlp.", c.hidden_size, c.dense_intermediate_size)
        return Section(plain + specs(prefix, "dense", mlp), [])
    plain += chain.from_iterable(specs(prefix, component, rows) for component, rows in _moe(c).items())
    return Section(plain, specs(prefix, "routed_experts", _expert(c)), c.num_experts)


def _mtp_block(c: KimiK3Config, layer: int) -> Section:
    """A drafter block: one MLA + MoE decoder layer without residual mixers, its own head and input projection."""
    h = c.hidden_size
    rows = [
        Row("enorm.weight", (h,)),
        Row("hnorm.weight", (h,)),
        Row("eh_proj.weight", (h, 2 * h)),
        *_layer_norms(c),
        *_mla(c, c.num_heads),
        *chain.from_iterable(_moe(c).values()),
        Row("shared_head.norm.weight", (h,)),
        Row("shared_head.head.weight", (c.vocab_size, h), VOCAB),
    ]
    prefix = f"{PREFIX}model.layers.{layer}."
    return Section(specs(prefix, "mtp", rows), specs(prefix, "mtp", _expert(c)), c.num_experts)


def _dspark(c: KimiK3Config) -> Section:
    """The DSpark drafter, published apart from its target: its names have no prefix. Dense MLA layers without an output
    gate; context projection and Markov head are replicated."""
    h = c.hidden_size
    rows = [
        Row("context_proj.weight", (h, len(c.dspark_target_layer_ids) * h)),
        Row("context_norm.weight", (h,)),
        Row("final_norm.weight", (h,)),
        *(
            Row(f"markov_head.{w}.weight", (c.vocab_size, c.dspark_markov_rank))
            for w in ("markov_w1", "markov_w2")
        ),
    ]
    layer = [*_layer_norms(c), *_mla(c, c.dspark_num_heads, gated=False)]
    layer += _mlp("mlp.", h, c.dspark_intermediate_size)
    plain = specs("", "dspark", rows)
    for number in range(c.num_dspark_layers):
        plain += specs(f"layers.{number}.", "dspark", layer)
    return Section(plain, [])


def _layer_norms(c: KimiK3Config) -> list[Row]:
    return [
        Row(f"{name}.weight", (c.hidden_size,)) for name in ("input_layernorm", "post_attention_layernorm")
    ]


def _mixer(c: KimiK3Config, name: str) -> list[Row]:
    """Norm and one-row score projection of an attention-residual mix."""
    return [Row(f"{name}_norm.weight", (c.hidden_size,)), Row(f"{name}_proj.weight", (1, c.hidden_size))]


def _kda(c: KimiK3Config) -> list[Row]:
    """Kimi delta attention. Convolutions, decay and output norm are stored in FP32; `A_log` is stored longer
    than there are heads, and its zero tail is never read."""
    h, heads, width = c.hidden_size, c.kda_num_heads, c.kda_num_heads * c.kda_head_dim
    wide = [Row(f"self_attn.{name}_proj.weight", (width, h), COLUMN) for name in "qkvg"]
    conv = [
        Row(f"self_attn.{name}_conv1d.weight", (width, 1, c.kda_conv_size), COLUMN, "F32") for name in "qkv"
    ]
    return [
        *wide,
        *conv,
        Row("self_attn.f_a_proj.weight", (c.kda_gate_rank, h)),
        Row("self_attn.f_b_proj.weight", (width, c.kda_gate_rank), COLUMN),
        Row("self_attn.b_proj.weight", (heads, h), COLUMN),
        Row("self_attn.A_log", (c.kda_a_log_size,), COLUMN, "F32", read=heads),
        Row("self_attn.dt_bias", (width,), COLUMN, "F32"),
        Row("self_attn.o_norm.weight", (c.kda_head_dim,), REPLICATED, "F32"),
        Row("self_attn.o_proj.weight", (h, width), ROW),
    ]


def _mla(c: KimiK3Config, heads: int, gated: bool = True) -> list[Row]:
    """Multi-head latent attention, with an output gate or without."""
    h = c.hidden_size
    query, key_value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim
    return [
        Row("self_attn.q_a_proj.weight", (c.q_lora_rank, h)),
        Row("self_attn.q_a_layernorm.weight", (c.q_lora_rank,)),
        Row("self_attn.q_b_proj.weight", (heads * query, c.q_lora_rank), COLUMN),
        Row("self_attn.kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.qk_rope_head_dim, h)),
        Row("self_attn.kv_a_layernorm.weight", (c.kv_lora_rank,)),
        Row("self_attn.kv_b_proj.weight", (heads * key_value, c.kv_lora_rank), COLUMN),
        *([Row("self_attn.g_proj.weight", (heads * c.v_head_dim, h), COLUMN)] if gated else []),
        Row("self_attn.o_proj.weight", (h, heads * c.v_head_dim), ROW),
    ]


def _moe(c: KimiK3Config) -> dict[str, list[Row]]:
    """What a latent MoE layer has beside its routed experts, by component. All of it is replicated: the
    residual stream is divided over tokens there, not over channels."""
    h, latent, base = c.hidden_size, c.moe_latent_size, "block_sparse_moe."
    return {
        "router": [
            Row(base + "gate.weight", (c.num_experts, h)),
            Row(base + "gate.e_score_correction_bias", (c.num_experts,), REPLICATED, "F32"),
        ],
        "latent": [
            Row(base + "routed_expert_down_proj.weight", (latent, h)),
            Row(base + "routed_expert_norm.weight", (latent,)),
            Row(base + "routed_expert_up_proj.weight", (h, latent)),
        ],
        "shared_experts": _mlp(base + "shared_experts.", h, c.shared_intermediate_size),
    }


def _mlp(prefix: str, hidden: int, intermediate: int) -> list[Row]:
    return [
        Row(prefix + "gate_proj.weight", (intermediate, hidden)),
        Row(prefix + "up_proj.weight", (intermediate, hidden)),
        Row(prefix + "down_proj.weight", (hidden, intermediate)),
    ]


def _expert(c: KimiK3Config) -> list[Row]:
    """MXFP4 tensors of one routed expert: w1 gate, w2 down, w3 up.

    Raises ValueError when a width is not a whole number of scale groups.
    """
    latent, inner, rows = c.moe_latent_size, c.moe_intermediate_size, []
    for name, (out, width) in {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}.items():
        if width % MXFP4_GROUP:
            raise ValueError(
                f"Expert matrix {name} has {width} input columns, which is not a multiple of the {MXFP4_GROUP} that "
                "share an MXFP4 scale: change moe_latent_size or moe_intermediate_size."
            )
        stem = f"block_sparse_moe.experts.*.{name}"
        packed, scale = (Quantized("mxfp4", piece, stem, (out, width)) for piece in ("weight", "scale"))
        rows.append(Row(f"{stem}.weight_packed", (out, width // 2), EXPERT, "U8", quantized=packed))
        shape = (out, width // MXFP4_GROUP)
        rows.append(Row(f"{stem}.weight_scale", shape, EXPERT, "U8", quantized=scale))
    return rows
