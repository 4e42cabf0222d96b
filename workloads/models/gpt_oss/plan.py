"""What a gpt-oss stack needs: limits of its dimensions, padding of its kernel, its caches. Imports no torch."""

from collections.abc import Iterator, Mapping

from workloads.loading.tensor_table import MXFP4_GROUP, bytes_by_component
from workloads.models.gpt_oss.config import CHECKPOINT_LAYOUTS, GptOssConfig
from workloads.models.gpt_oss.tensors import sections
from workloads.models.planning import Experts, Load, Part

COMPONENTS = {
    "routed_experts": "routed experts",
    "attention": "attention",
    "embedding": "embedding",
    "head": "output head",
    "router": "router",
    "norms": "norms",
}
MAY_BE_ZERO: tuple[str, ...] = ()
TILE = 128  # rows and columns of one block in which the kernel stores scales


def problems(c: GptOssConfig) -> Iterator[str]:
    if c.num_key_value_heads < 1 or c.num_heads % c.num_key_value_heads:
        yield (
            f"model.gpt_oss.num_heads is {c.num_heads}, which the num_key_value_heads {c.num_key_value_heads} do not "
            "divide: each head of keys serves equally many of queries."
        )
    if c.head_dim % 2:
        yield f"model.gpt_oss.head_dim is {c.head_dim}; rotation turns pairs of channels, so it must be even."
    for key in ("hidden_size", "intermediate_size"):
        if getattr(c, key) % MXFP4_GROUP:
            yield (
                f"model.gpt_oss.{key} is {getattr(c, key)}; MXFP4 shares a scale between {MXFP4_GROUP} values, so it "
                "must be a multiple of that."
            )
    if c.expert_alignment % TILE:
        yield (
            f"model.gpt_oss.expert_alignment is {c.expert_alignment}; the kernel stores scales in blocks of {TILE} "
            "rows and columns, so it must be a multiple of that."
        )
    if c.expert_quantization != "mxfp4":
        yield (
            f"model.gpt_oss.expert_quantization is {c.expert_quantization!r}: checkpoints of gpt-oss hold mxfp4 "
            "experts only."
        )
    if c.checkpoint_layout not in CHECKPOINT_LAYOUTS:
        yield (
            f"model.gpt_oss.checkpoint_layout is {c.checkpoint_layout!r}; choose one of "
            f"{', '.join(CHECKPOINT_LAYOUTS)}."
        )


def divided(c: GptOssConfig) -> Mapping[str, int]:
    return {key: getattr(c, key) for key in ("num_heads", "num_key_value_heads", "vocab_size")}


def experts(c: GptOssConfig) -> Experts:
    return Experts(
        count=c.num_experts,
        per_token=c.num_experts_per_token,
        layers=c.num_layers,
        hidden=c.hidden_size,
        intermediate=c.intermediate_size,
        quantization=f"{c.expert_quantization} with biases",
        keys={
            "count": "num_experts",
            "per_token": "num_experts_per_token",
            "hidden": "hidden_size",
            "intermediate": "intermediate_size",
        },
        blocks=c.intermediate_size // MXFP4_GROUP,
        padding=lambda tp, ep: _padding(c, tp, ep),
    )


def _padding(c: GptOssConfig, tp: int, ep: int) -> Part:
    """What the fused layout of the first rank's experts has beyond the checkpoint's bytes."""
    _, inner = c.intermediate_share(0, 1 if ep > 1 else tp)
    hidden, padded = c.padded(c.hidden_size), c.padded(inner)
    values, biases = 3 * hidden * padded, 2 * padded + hidden
    each = values // 2 + values // MXFP4_GROUP + 2 * biases
    held = c.num_layers * (c.num_experts // ep) * each
    loaded = bytes_by_component(sections(c), tp, ep)["routed_experts"]
    basis = f"hidden {c.hidden_size} -> {hidden}, intermediate {inner} -> {padded}"
    return Part("expert padding", "padding", held - loaded, basis)


def derived(c: GptOssConfig, tp: int) -> list[Part]:
    """Nothing: post-processing reorders the experts where they lie."""
    return []


def caches(c: GptOssConfig, load: Load, tp: int) -> list[Part]:
    """Keys and values in BF16. Layers with a window keep all positions, too."""
    per_token = c.num_layers * 2 * c.num_key_value_heads // tp * c.head_dim * 2
    return [Part("KV cache", "cache", load.tokens * per_token, f"{load.tokens:,} tokens x {per_token:,} B")]
