"""What a DeepSeek-V4.1 stack needs: limits of its dimensions, what it derives, what its requests hold.

Imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from workloads.loading.tensor_table import MXFP4_GROUP, counted
from workloads.models.deepseek_v4.plan import head_problems, packed_scales
from workloads.models.deepseek_v41.config import FP8_BLOCK, OUTPUT_CHUNK, DeepseekV41Config
from workloads.models.deepseek_v41.tensors import sections
from workloads.models.dspark.plan import drafter_problems
from workloads.models.media import slot_problems
from workloads.models.planning import Experts, Load, Part

COMPONENTS = {
    "routed_experts": "routed experts",
    "engram": "engram tables and projections",
    "shared_experts": "shared experts",
    "attention": "attention",
    "compressors": "compressors and indexers",
    "hyper_connections": "hyper-connections",
    "embedding": "embedding",
    "head": "output head",
    "router": "router",
    "norms": "norms",
    "dspark": "DSpark drafter",
    "vision": "image projector",
}
MAY_BE_ZERO = ("num_dspark_layers", "dspark_mask_token_id")
NVFP4_GROUP = 16
_KEY = "model.deepseek_v41"


def problems(c: DeepseekV41Config) -> Iterator[str]:
    if len(c.compress_ratios) != c.all_layers:
        yield (
            f"{_KEY}.compress_ratios has {len(c.compress_ratios)} entries; num_layers {c.num_layers} and "
            f"num_dspark_layers {c.num_dspark_layers} need {c.all_layers}, the drafter's last."
        )
        return
    if any(c.compress_ratios[c.num_layers :]):
        yield (
            f"{_KEY}.compress_ratios ends with {c.compress_ratios[c.num_layers :]}; the stages of the DSpark drafter "
            "attend to a window only, so theirs must be 0."
        )
    yield from drafter_problems(c, "deepseek_v41")
    yield from _sources(c)
    yield from _lists(c)
    yield from _widths(c)
    if c.expert_quantization != "mxfp4":
        yield f"{_KEY}.expert_quantization is {c.expert_quantization!r}; this family has mxfp4 experts only."
    if c.image_lengths:
        keys = "image_token_start and image_lengths"
        yield from slot_problems("deepseek_v41", keys, c.image_token_start, c.image_lengths, c.vocab_size)
    if c.engram_max_ngram_size < 2:
        yield f"{_KEY}.engram_max_ngram_size is {c.engram_max_ngram_size}; an n-gram has 2 tokens or more."
    if c.engram_pad_token >= c.vocab_size:
        yield f"{_KEY}.engram_pad_token is {c.engram_pad_token}; it must be below vocab_size {c.vocab_size}."


def _sources(c: DeepseekV41Config) -> Iterator[str]:
    """A layer that compresses follows one that makes keys in its ratio, and one that chooses among those."""
    for maker in c.kv_source_layers:
        if maker not in c.index_source_layers:
            yield f"{_KEY}.index_source_layers lacks layer {maker}, which makes keys: only an indexer can choose them."
    for layer, ratio in enumerate(c.compress_ratios[: c.num_layers]):
        source, chooser = c.kv_source(layer), c.index_source(layer)
        if ratio < 0:
            yield f"{_KEY}.compress_ratios holds {ratio}; a ratio is 0 (window only) or a number of tokens."
        elif ratio and (source is None or c.compress_ratios[source] != ratio):
            yield (
                f"{_KEY}.kv_source_layers: layer {layer} compresses {ratio} tokens and finds no keys of that ratio; "
                "let one of the layers up to it, of the same ratio, be their source."
            )
        elif ratio and chooser is not None and source is not None and chooser < source:
            yield f"{_KEY}.index_source_layers: layer {layer} would follow a choice made before the keys of {source}."
    filters, choosers = c.candidate_source_layer, c.index_source_layers
    if filters not in c.index_source_layers:
        yield f"{_KEY}.candidate_source_layer is {filters}; it must be one of index_source_layers."
    elif any(c.kv_source(n) != c.kv_source(filters) for n in choosers if n > filters):
        yield f"{_KEY}.candidate_source_layer is {filters}; the indexers after it must choose among the same keys."


def _lists(c: DeepseekV41Config) -> Iterator[str]:
    """Layers that are named must exist, and have what they are named for."""
    for key in ("kv_source_layers", "index_source_layers", "engram_layers"):
        named = getattr(c, key)
        if named != sorted(set(named)) or any(not 0 <= layer < c.num_layers for layer in named):
            yield f"{_KEY}.{key} is {named}; give layers between 0 and {c.num_layers - 1}, each once, in order."
        elif key.endswith("source_layers") and any(c.compress_ratios[layer] == 0 for layer in named):
            yield f"{_KEY}.{key} is {named}; a layer with a compress ratio of 0 has no keys to make or to choose."
    if 0 in c.engram_layers:
        yield f"{_KEY}.engram_layers is {c.engram_layers}; before layer 0 all copies must be equal."
    if not c.engram_layers:
        yield f"{_KEY}.engram_layers is empty; name the layers with tables of n-grams."


def _widths(c: DeepseekV41Config) -> Iterator[str]:
    blocks = ("hidden_size", "moe_intermediate_size", "q_lora_rank", "o_lora_rank", "engram_head_dim")
    for key in (*blocks, "kernel_intermediate_multiple"):
        if getattr(c, key) % FP8_BLOCK:
            yield (
                f"{_KEY}.{key} is {getattr(c, key)}; FP8 shares a scale between {FP8_BLOCK} rows and columns, so it "
                "must be a multiple of that."
            )
    if c.head_dim % OUTPUT_CHUNK:
        yield f"{_KEY}.head_dim is {c.head_dim}; the attention kernel takes chunks of {OUTPUT_CHUNK} channels."
    counts = {"num_experts": c.num_experts}
    if c.num_dspark_layers:
        counts["dspark_num_experts"] = c.dspark_num_experts
    for key, count in counts.items():
        if count % 2:
            yield f"{_KEY}.{key} is {count}; it must be even, so that ranks can share them."
    yield from head_problems(c, _KEY)


def divided(c: DeepseekV41Config) -> Mapping[str, int]:
    shared = {key: getattr(c, key) for key in ("num_heads", "o_groups", "vocab_size")}
    return {**shared, "engram_num_heads (of all orders)": c.engram_heads}


def padded_shared(c: DeepseekV41Config) -> int:
    """Intermediate size of the shared experts, padded for the kernel."""
    multiple = c.kernel_intermediate_multiple
    return -(-c.shared_intermediate_size // multiple) * multiple


def experts(c: DeepseekV41Config) -> Experts:
    own = _experts(c, c.num_layers, "")
    if c.num_dspark_layers:
        own = replace(own, drafter=_experts(c.of_drafter(), c.num_dspark_layers, "dspark_"))
    return own


def _experts(c: DeepseekV41Config, layers: int, prefix: str) -> Experts:
    """prefix: of the keys of their numbers."""
    return Experts(
        count=c.num_experts,
        per_token=c.num_experts_per_token,
        layers=layers,
        hidden=c.hidden_size,
        intermediate=c.moe_intermediate_size,
        quantization=c.expert_quantization,
        fused_shared=padded_shared(c),
        keys={
            "count": f"{prefix}num_experts",
            "per_token": f"{prefix}num_experts_per_token",
            "hidden": "hidden_size",
            "intermediate": "moe_intermediate_size",
        },
    )


def derived(c: DeepseekV41Config, tp: int) -> list[Part]:
    """Scales of FP8 matrices by row; padding of the shared experts and their copy in the kernel's layout (w2 is an
    alias) with scales for every 32 columns; rotation tables; the first layer's projection of one copy; the hash."""
    packed = sum(packed_scales(spec, tp, FP8_BLOCK) * copies for spec, copies in counted(sections(c)))
    inner, hidden = padded_shared(c), c.hidden_size
    added = c.all_layers * 3 * (inner - c.shared_intermediate_size) * hidden
    shared = c.all_layers * (2 * inner * hidden + 3 * inner * hidden // MXFP4_GROUP)
    roots = 2 if c.num_dspark_layers else 1
    tables = roots * 2 * c.max_position_embeddings * c.qk_rope_head_dim * 4
    broadcast = (2 + c.hc_mult) * c.hc_mult * hidden * 4
    basis = f"intermediate {c.shared_intermediate_size} -> {inner}"
    return [
        Part("packed FP8 scales", "derived", packed, f"4 bytes for every row and {4 * FP8_BLOCK} columns"),
        Part("shared expert padding", "padding", added, basis),
        Part("fused shared experts", "derived", shared, "w13 and scales in the MoE kernel's layout"),
        Part("rotation tables", "derived", tables, f"{c.max_position_embeddings:,} positions"),
        Part("first mix of one copy", "derived", broadcast, "hc_attn_fn summed over copies"),
        Part("engram token map", "derived", 8 * c.vocab_size, "an id for each token"),
    ]


def caches(c: DeepseekV41Config, load: Load, tp: int) -> list[Part]:
    """Keys of the window and of the sources in BF16, unfinished groups in FP32; nothing is split over TP."""
    window = c.all_layers * c.sliding_window * c.head_dim * 2
    ratios = [c.compress_ratios[layer] for layer in c.kv_source_layers]
    per_token = sum((c.head_dim + c.index_head_dim) * 2 / ratio for ratio in ratios)
    unfinished = sum(ratio * (2 if ratio > 1 else 1) * c.head_dim * 4 for ratio in ratios)
    history = 8 * (c.engram_max_ngram_size - 1)
    each = window + unfinished + history
    return [
        Part(
            "compressed KV of the sources",
            "cache",
            int(load.tokens * per_token),
            f"{load.tokens:,} tokens x {per_token:,.1f} B",
        ),
        Part(
            "window and open groups",
            "cache",
            load.requests * each,
            f"{load.requests} requests x {each:,} B",
        ),
    ]
