"""What a DeepSeek-V4 stack needs: limits of its dimensions, what it derives, what its requests hold.

Imports no torch.
"""

from collections.abc import Iterator, Mapping

from workloads.loading.tensor_table import COLUMN, MXFP4_GROUP, ROW, TensorSpec, counted
from workloads.models.deepseek_v4.config import OVERLAPPING, DeepseekV4Config, Dimensions
from workloads.models.deepseek_v4.tensors import FP8_BLOCK, sections
from workloads.models.dspark.plan import drafter_problems
from workloads.models.media import slot_problems
from workloads.models.planning import Experts, Load, Part, drafters_own

COMPONENTS = {
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "attention": "attention",
    "compressors": "compressors and indexers",
    "hyper_connections": "hyper-connections",
    "embedding": "embedding",
    "head": "output head",
    "router": "router",
    "norms": "norms",
    "mtp": "MTP block",
    "dspark": "DSpark drafter",
    "vision": "image projector",
}
MAY_BE_ZERO = (
    "num_mtp_layers",
    "num_hash_layers",
    "num_dspark_layers",
    "dspark_mask_token_id",
)
_KEY = "model.deepseek_v4"


def problems(c: DeepseekV4Config) -> Iterator[str]:
    if len(c.compress_ratios) != c.all_layers:
        yield (
            f"{_KEY}.compress_ratios has {len(c.compress_ratios)} entries; num_layers {c.num_layers}, num_mtp_layers "
            f"{c.num_mtp_layers} and num_dspark_layers {c.num_dspark_layers} need {c.all_layers}, the drafter's last."
        )
    elif c.num_dspark_layers and any(c.compress_ratios[c.num_layers :]):
        yield (
            f"{_KEY}.compress_ratios ends with {c.compress_ratios[c.num_layers :]}; the stages of the DSpark drafter "
            "attend to a window only, so theirs must be 0."
        )
    yield from drafter_problems(c, "deepseek_v4")
    negative = [ratio for ratio in c.compress_ratios if ratio < 0]
    if negative:
        yield f"{_KEY}.compress_ratios holds {negative}; a ratio is 0 (window only) or a number of tokens."
    if c.expert_quantization == "fp8":
        yield (
            f"{_KEY}.expert_quantization is 'fp8', as the base models are published: no kernel of the native engine "
            "reads fp8 experts of this family; use a checkpoint with mxfp4 experts."
        )
    elif c.expert_quantization != "mxfp4":
        yield (
            f"{_KEY}.expert_quantization is {c.expert_quantization!r}; checkpoints of DeepSeek-V4 hold mxfp4 or fp8 "
            "experts."
        )
    if c.num_mtp_layers > 1:
        yield f"{_KEY}.num_mtp_layers is {c.num_mtp_layers}; the drafter has one block at most."
    if c.vision:
        keys = "image_token_start and image_lengths"
        yield from slot_problems("deepseek_v4", keys, c.image_token_start, c.image_lengths, c.vocab_size)
    if c.num_experts % 2:
        yield f"{_KEY}.num_experts is {c.num_experts}; it must be even, so that a changed checkpoint stays valid."
    yield from _widths(c)


def _widths(c: DeepseekV4Config) -> Iterator[str]:
    for key in ("hidden_size", "moe_intermediate_size"):
        if getattr(c, key) % MXFP4_GROUP:
            yield (
                f"{_KEY}.{key} is {getattr(c, key)}; MXFP4 shares a scale between {MXFP4_GROUP} values, so it must be "
                "a multiple of that."
            )
    group = {
        "o_lora_rank": c.o_lora_rank,
        "head_dim times the heads of a group": c.num_heads // c.o_groups * c.head_dim,
    }
    for key, width in group.items():
        if width % FP8_BLOCK:
            yield (
                f"{_KEY}: {key} is {width}; FP8 shares a scale between {FP8_BLOCK} rows, so it must be a multiple of "
                "that for the groups to be divided over ranks."
            )
    if c.index_head_dim & (c.index_head_dim - 1):
        yield f"{_KEY}.index_head_dim is {c.index_head_dim}; the Hadamard rotation takes a power of two."
    yield from head_problems(c, _KEY)


def head_problems(c: Dimensions, family: str) -> Iterator[str]:
    """What any of these families asks of its heads. family: the key of `c`."""
    if c.num_heads % c.o_groups:
        yield f"{family}.o_groups is {c.o_groups}; it must divide num_heads {c.num_heads}."
    for key, width in (("head_dim", c.head_dim), ("index_head_dim", c.index_head_dim)):
        if c.qk_rope_head_dim > width or c.qk_rope_head_dim % 2:
            yield f"{family}.qk_rope_head_dim is {c.qk_rope_head_dim}; it must be even and at most {key} {width}."


def divided(c: DeepseekV4Config) -> Mapping[str, int]:
    return {key: getattr(c, key) for key in ("num_heads", "o_groups", "vocab_size")}


def experts(c: DeepseekV4Config) -> Experts:
    return Experts(
        count=c.num_experts,
        per_token=c.num_experts_per_token,
        layers=c.all_layers,
        hidden=c.hidden_size,
        intermediate=c.moe_intermediate_size,
        quantization=c.expert_quantization,
        fused_shared=c.shared_intermediate_size,
        keys={
            "count": "num_experts",
            "per_token": "num_experts_per_token",
            "hidden": "hidden_size",
            "intermediate": "moe_intermediate_size",
        },
    )


def derived(c: DeepseekV4Config, tp: int) -> list[Part]:
    """Scales of FP8 matrices by row; the shared experts' copy in the kernel's layout (w2 is an alias) with scales for
    every 32 columns; rotation tables; the first layer's projection of one copy."""
    packed = sum(packed_scales(spec, tp) * copies for spec, copies in counted(sections(c)))
    inner, hidden = c.shared_intermediate_size, c.hidden_size
    layers = c.all_layers
    shared = layers * (2 * inner * hidden + 3 * inner * hidden // MXFP4_GROUP)
    roots = 2 if c.num_mtp_layers or c.num_dspark_layers else 1
    tables = roots * 2 * c.max_position_embeddings * c.qk_rope_head_dim * 4
    broadcast = (2 + c.hc_mult) * c.hc_mult * hidden * 4
    vocabulary = c.vocab_size // tp * hidden * 2
    own = [drafters_own(what, vocabulary) for what in ("embedding", "head")] if c.num_mtp_layers else []
    return [
        *own,
        Part("packed FP8 scales", "derived", packed, "4 bytes for every row and 512 columns"),
        Part("fused shared experts", "derived", shared, "w13 and scales in the MoE kernel's layout"),
        Part("rotation tables", "derived", tables, f"{c.max_position_embeddings:,} positions"),
        Part("first mix of one copy", "derived", broadcast, "hc_attn_fn summed over copies"),
    ]


def packed_scales(spec: TensorSpec, tp: int, block: int = FP8_BLOCK) -> int:
    """Bytes of what one rank packs for a matrix, 0 for other tensors and for routed experts."""
    q = spec.quantized
    if q is None or q.format != f"fp8_e8m0_block{block}" or q.piece != "weight" or ".experts." in spec.name:
        return 0
    rows, columns = q.shape
    rows, columns = (
        (rows // tp if spec.shard == COLUMN else rows),
        (columns // tp if spec.shard == ROW else columns),
    )
    return rows * -(-columns // (4 * block)) * 4


def caches(c: DeepseekV4Config, load: Load, tp: int) -> list[Part]:
    """Keys of the window and of the groups in BF16, unfinished groups in FP32; nothing is split over TP."""
    layers = c.all_layers
    window = layers * c.sliding_window * c.head_dim * 2
    per_token, unfinished = 0.0, 0
    for layer, ratio in enumerate(c.compress_ratios):
        if not ratio:
            continue
        widths = [c.head_dim, c.index_head_dim] if c.indexed(layer) else [c.head_dim]
        overlap = 2 if ratio == OVERLAPPING else 1
        per_token += sum(widths) * 2 / ratio
        unfinished += sum(2 * (overlap * ratio) * (overlap * width) * 4 for width in widths)
    each = f"{load.requests} requests x {window + unfinished:,} B"
    return [
        Part(
            "compressed KV",
            "cache",
            int(load.tokens * per_token),
            f"{load.tokens:,} tokens x {per_token:,.1f} B",
        ),
        Part("window and open groups", "cache", load.requests * (window + unfinished), each),
    ]
