"""What a Kimi-K3 stack needs: limits of its dimensions, what it derives, what its requests hold. Imports no torch."""

from collections.abc import Iterator, Mapping

from workloads.loading.tensor_table import MXFP4_GROUP
from workloads.models.dspark.plan import drafter_problems
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.planning import Experts, Load, Part, drafters_own

COMPONENTS = {
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "kda": "KDA attention",
    "mla": "MLA attention",
    "latent": "latent projections",
    "dense": "dense MLP",
    "embedding": "embedding",
    "head": "output head",
    "router": "router",
    "norms": "norms and mixers",
    "mtp": "MTP block",
    "dspark": "DSpark drafter",
}
MAY_BE_ZERO = ("num_mtp_layers", "num_dense_layers", "num_dspark_layers", "dspark_mask_token_id")


def problems(c: KimiK3Config) -> Iterator[str]:
    outside = [layer for layer in c.full_attention_layers if not 0 <= layer < c.num_layers]
    if outside:
        yield (
            f"model.kimi_k3.full_attention_layers names {outside}; with num_layers {c.num_layers} layers are "
            f"0 to {c.num_layers - 1}."
        )
    if c.kda_a_log_size < c.kda_num_heads:
        yield (
            f"model.kimi_k3.kda_a_log_size is {c.kda_a_log_size}; it must hold a value for each of the "
            f"kda_num_heads {c.kda_num_heads}."
        )
    for key in ("moe_latent_size", "moe_intermediate_size"):
        if getattr(c, key) % MXFP4_GROUP:
            yield (
                f"model.kimi_k3.{key} is {getattr(c, key)}; MXFP4 shares a scale between {MXFP4_GROUP} "
                "values, so it must be a multiple of that."
            )
    yield from drafter_problems(c, "kimi_k3")
    if c.num_dspark_layers and c.qk_rope_head_dim % 2:
        yield (
            f"model.kimi_k3.qk_rope_head_dim is {c.qk_rope_head_dim}; the drafter turns its channels in pairs, so it "
            "must be even."
        )


def divided(c: KimiK3Config) -> Mapping[str, int]:
    drafter = ("dspark_num_heads",) if c.num_dspark_layers else ()
    return {key: getattr(c, key) for key in ("num_heads", "kda_num_heads", "vocab_size", *drafter)}


def experts(c: KimiK3Config) -> Experts:
    return Experts(
        count=c.num_experts,
        per_token=c.num_experts_per_token,
        layers=c.num_layers - c.num_dense_layers + c.num_mtp_layers,
        hidden=c.moe_latent_size,
        intermediate=c.moe_intermediate_size,
        quantization="mxfp4",
        situ=True,
        keys={
            "count": "num_experts",
            "per_token": "num_experts_per_token",
            "hidden": "moe_latent_size",
            "intermediate": "moe_intermediate_size",
        },
    )


def derived(c: KimiK3Config, tp: int) -> list[Part]:
    """MLA's absorbed projections in BF16, KDA's convolution weights regrouped for decoding in FP32; what the drafter
    has of its target a second time, or joins of its layers in BF16."""
    full, linear = _attention_layers(c)
    absorbed = c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim) * 2
    conv = 3 * c.kda_num_heads // tp * c.kda_head_dim * c.kda_conv_size
    norm = c.kda_head_dim * 4
    nbytes = full * c.num_heads // tp * absorbed + linear * (conv * 4 + norm)
    parts = [Part("derived weights", "derived", nbytes, "absorbed MLA, KDA decode")]
    if c.num_mtp_layers:
        parts.append(drafters_own("embedding", c.vocab_size // tp * c.hidden_size * 2))
    if c.num_dspark_layers:
        joined = _latent_width(c) * c.hidden_size * 2 + c.kv_lora_rank * 2
        nbytes = c.num_dspark_layers * (c.dspark_num_heads // tp * absorbed + joined)
        parts.append(Part("DSpark derived", "derived", nbytes, "absorbed MLA, context KV of all layers"))
    return parts


def caches(c: KimiK3Config, load: Load, tp: int) -> list[Part]:
    """KV of MLA in BF16 (the latent is not split over TP), KDA state in FP32, convolution tails in BF16."""
    full, linear = _attention_layers(c)
    heads = c.kda_num_heads // tp
    state = linear * heads * c.kda_head_dim**2 * 4
    tail = linear * 3 * heads * c.kda_head_dim * (c.kda_conv_size - 1) * 2
    per_token = full * _latent_width(c) * 2
    each = f"{load.requests} requests x {state + tail:,} B"
    parts = [
        Part("KV cache", "cache", load.tokens * per_token, f"{load.tokens:,} tokens x {per_token:,} B"),
        Part("KDA state", "cache", load.requests * (state + tail), each),
    ]
    if c.num_dspark_layers:
        per_token = c.num_dspark_layers * _latent_width(c) * 2
        tokens = load.tokens + load.requests * c.dspark_block_size
        basis = f"{tokens:,} tokens x {per_token:,} B, a block of each request included"
        parts.append(Part("DSpark KV", "cache", tokens * per_token, basis))
    return parts


def _latent_width(c: KimiK3Config) -> int:
    """Channels that MLA keeps of a token."""
    return c.kv_lora_rank + c.qk_rope_head_dim


def _attention_layers(c: KimiK3Config) -> tuple[int, int]:
    """Numbers of MLA and of KDA layers, MTP blocks included."""
    layers = c.num_layers + c.num_mtp_layers
    full = sum(c.is_full_attention(layer) for layer in range(layers))
    return full, layers - full
