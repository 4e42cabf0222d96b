"""Every checkpoint tensor of a Kimi-K3 stack: name, dtype, shape, how it is split, which part of the model it is.

Imports no torch: the planner sums memory from this table, the generator and the validator follow it.
Names, shapes and dtypes are those of the published checkpoint's headers, whose text tensors this table
reproduces to the byte.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from workloads.models.kimi_k3.config import KimiK3Config

PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")  # published beside the text tensors, not loaded here
DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
MXFP4_GROUP = 32  # values that share one E8M0 scale byte, along the input dimension


@dataclass(frozen=True)
class Shard:
    """How ranks divide a tensor: `replicated`, `tensor` and `vocab` (dimension `dim` over the TP group), or
    `expert` (whole tensors, contiguous expert ids over the EP group)."""

    kind: str
    dim: int = 0


REPLICATED = Shard("replicated")
COLUMN = Shard("tensor", 0)
ROW = Shard("tensor", 1)
EXPERT = Shard("expert")
VOCAB = Shard("vocab", 0)


@dataclass(frozen=True)
class TensorSpec:
    """One checkpoint tensor. dtype: safetensors name. component: the part of the model that memory plans print
    (kda, mla, router, latent, shared_experts, dense, routed_experts, embedding, head, norms, mtp).
    read: leading entries of dimension 0 that a model reads, where the stored tensor is longer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard
    component: str
    read: int | None = None

    @property
    def module(self) -> str:
        """Path of the module that owns it, without the checkpoint's prefix: `model.layers.1.self_attn.q_proj`."""
        return self.name.removeprefix(PREFIX).rpartition(".")[0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Logical parameters: two per packed byte, none for scales."""
        if self.name.endswith(".weight_scale"):
            return 0
        return prod(self.shape) * (2 if self.name.endswith(".weight_packed") else 1)


@dataclass(frozen=True)
class _Row:
    """A line of the table: name below its layer, shape, split, dtype."""

    suffix: str
    shape: tuple[int, ...]
    shard: Shard = REPLICATED
    dtype: str = "BF16"
    read: int | None = None

    def spec(self, prefix: str, component: str) -> TensorSpec:
        return TensorSpec(prefix + self.suffix, self.dtype, self.shape, self.shard, component, self.read)


def checkpoint_tensors(config: KimiK3Config) -> Iterator[TensorSpec]:
    """Every tensor by its real name: layer by layer, the experts of a layer one after another."""
    for plain, expert in _sections(config):
        yield from plain
        for number in range(config.num_experts if expert else 0):
            for spec in expert:
                yield replace(spec, name=spec.name.replace(".*.", f".{number}."))


def tensor_groups(config: KimiK3Config) -> Iterator[tuple[TensorSpec, int]]:
    """The same with the experts of a layer collapsed into one spec (`experts.*.w1.weight_packed`) and their
    number, so that a model of half a million tensors is summed in milliseconds."""
    for plain, expert in _sections(config):
        yield from ((spec, 1) for spec in plain)
        yield from ((spec, config.num_experts) for spec in expert)


def local_bytes(spec: TensorSpec, copies: int, tp: int, ep: int) -> int:
    """Bytes of `copies` such tensors that one rank holds. Uneven splits count as the largest share."""
    if spec.shard.kind == "expert":
        return spec.nbytes * -(-copies // ep)
    if spec.shard.kind == "replicated":
        return spec.nbytes * copies
    stored = spec.shape[spec.shard.dim]
    read = stored if spec.read is None else spec.read
    return spec.nbytes // stored * -(-read // tp) * copies


def bytes_by_component(config: KimiK3Config, tp: int = 1, ep: int = 1) -> dict[str, int]:
    """Bytes that one rank holds, by part of the model."""
    total: dict[str, int] = {}
    for spec, copies in tensor_groups(config):
        total[spec.component] = total.get(spec.component, 0) + local_bytes(spec, copies, tp, ep)
    return total


_Section = tuple[list[TensorSpec], list[TensorSpec]]  # tensors of their own, templates of expert tensors


def _sections(c: KimiK3Config) -> Iterator[_Section]:
    hidden, vocab = (c.hidden_size,), (c.vocab_size, c.hidden_size)
    yield [_Row("model.embed_tokens.weight", vocab, VOCAB).spec(PREFIX, "embedding")], []
    for layer in range(c.num_layers):
        yield _decoder_layer(c, layer)
    tail = _specs(PREFIX + "model.", "norms", [*_mixer(c, "output_attn_res"), _Row("norm.weight", hidden)])
    yield [*tail, _Row("lm_head.weight", vocab, VOCAB).spec(PREFIX, "head")], []
    for block in range(c.num_mtp_layers):
        yield _mtp_block(c, c.num_layers + block)


def _decoder_layer(c: KimiK3Config, layer: int) -> _Section:
    prefix = f"{PREFIX}model.layers.{layer}."
    mixers = [*_mixer(c, "self_attention_res"), *_mixer(c, "mlp_res")]
    plain = _specs(prefix, "norms", [*_layer_norms(c), *mixers])
    plain += _specs(prefix, "mla", _mla(c)) if c.is_full_attention(layer) else _specs(prefix, "kda", _kda(c))
    if c.is_dense(layer):
        mlp = _mlp("mlp.", c.hidden_size, c.dense_intermediate_size)
        return plain + _specs(prefix, "dense", mlp), []
    plain += chain.from_iterable(_specs(prefix, component, rows) for component, rows in _moe(c).items())
    return plain, _specs(prefix, "routed_experts", _expert(c))


def _mtp_block(c: KimiK3Config, layer: int) -> _Section:
    """A drafter block: one MLA + MoE decoder layer without residual mixers, its own head and input projection."""
    h = c.hidden_size
    rows = [
        _Row("enorm.weight", (h,)),
        _Row("hnorm.weight", (h,)),
        _Row("eh_proj.weight", (h, 2 * h)),
        *_layer_norms(c),
        *_mla(c),
        *chain.from_iterable(_moe(c).values()),
        _Row("shared_head.norm.weight", (h,)),
        _Row("shared_head.head.weight", (c.vocab_size, h), VOCAB),
    ]
    prefix = f"{PREFIX}model.layers.{layer}."
    return _specs(prefix, "mtp", rows), _specs(prefix, "mtp", _expert(c))


def _specs(prefix: str, component: str, rows: Iterable[_Row]) -> list[TensorSpec]:
    return [row.spec(prefix, component) for row in rows]


def _layer_norms(c: KimiK3Config) -> list[_Row]:
    return [
        _Row(f"{name}.weight", (c.hidden_size,)) for name in ("input_layernorm", "post_attention_layernorm")
    ]


def _mixer(c: KimiK3Config, name: str) -> list[_Row]:
    """Norm and one-row score projection of an attention-residual mix."""
    return [_Row(f"{name}_norm.weight", (c.hidden_size,)), _Row(f"{name}_proj.weight", (1, c.hidden_size))]


def _kda(c: KimiK3Config) -> list[_Row]:
    """Kimi delta attention. Convolutions, decay and output norm are stored in FP32; `A_log` is stored longer
    than there are heads, and its zero tail is never read."""
    h, heads, width = c.hidden_size, c.kda_num_heads, c.kda_num_heads * c.kda_head_dim
    wide = [_Row(f"self_attn.{name}_proj.weight", (width, h), COLUMN) for name in "qkvg"]
    conv = [
        _Row(f"self_attn.{name}_conv1d.weight", (width, 1, c.kda_conv_size), COLUMN, "F32") for name in "qkv"
    ]
    return [
        *wide,
        *conv,
        _Row("self_attn.f_a_proj.weight", (c.kda_gate_rank, h)),
        _Row("self_attn.f_b_proj.weight", (width, c.kda_gate_rank), COLUMN),
        _Row("self_attn.b_proj.weight", (heads, h), COLUMN),
        _Row("self_attn.A_log", (c.kda_a_log_size,), COLUMN, "F32", read=heads),
        _Row("self_attn.dt_bias", (width,), COLUMN, "F32"),
        _Row("self_attn.o_norm.weight", (c.kda_head_dim,), REPLICATED, "F32"),
        _Row("self_attn.o_proj.weight", (h, width), ROW),
    ]


def _mla(c: KimiK3Config) -> list[_Row]:
    """Multi-head latent attention with an output gate."""
    h, heads = c.hidden_size, c.num_heads
    query, key_value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim
    return [
        _Row("self_attn.q_a_proj.weight", (c.q_lora_rank, h)),
        _Row("self_attn.q_a_layernorm.weight", (c.q_lora_rank,)),
        _Row("self_attn.q_b_proj.weight", (heads * query, c.q_lora_rank), COLUMN),
        _Row("self_attn.kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.qk_rope_head_dim, h)),
        _Row("self_attn.kv_a_layernorm.weight", (c.kv_lora_rank,)),
        _Row("self_attn.kv_b_proj.weight", (heads * key_value, c.kv_lora_rank), COLUMN),
        _Row("self_attn.g_proj.weight", (heads * c.v_head_dim, h), COLUMN),
        _Row("self_attn.o_proj.weight", (h, heads * c.v_head_dim), ROW),
    ]


def _moe(c: KimiK3Config) -> dict[str, list[_Row]]:
    """What a latent MoE layer has beside its routed experts, by component. All of it is replicated: the
    residual stream is divided over tokens there, not over channels."""
    h, latent, base = c.hidden_size, c.moe_latent_size, "block_sparse_moe."
    return {
        "router": [
            _Row(base + "gate.weight", (c.num_experts, h)),
            _Row(base + "gate.e_score_correction_bias", (c.num_experts,), REPLICATED, "F32"),
        ],
        "latent": [
            _Row(base + "routed_expert_down_proj.weight", (latent, h)),
            _Row(base + "routed_expert_norm.weight", (latent,)),
            _Row(base + "routed_expert_up_proj.weight", (h, latent)),
        ],
        "shared_experts": _mlp(base + "shared_experts.", h, c.shared_intermediate_size),
    }


def _mlp(prefix: str, hidden: int, intermediate: int) -> list[_Row]:
    return [
        _Row(prefix + "gate_proj.weight", (intermediate, hidden)),
        _Row(prefix + "up_proj.weight", (intermediate, hidden)),
        _Row(prefix + "down_proj.weight", (hidden, intermediate)),
    ]


def _expert(c: KimiK3Config) -> list[_Row]:
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
        stem = f"block_sparse_moe.experts.*.{name}."
        rows.append(_Row(stem + "weight_packed", (out, width // 2), EXPERT, "U8"))
        rows.append(_Row(stem + "weight_scale", (out, width // MXFP4_GROUP), EXPERT, "U8"))
    return rows
