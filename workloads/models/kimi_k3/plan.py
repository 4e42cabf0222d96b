"""What a Kimi-K3 stack needs: limits of its dimensions, what it derives, what its requests hold. Imports no torch."""

from collections.abc import Iterator, Mapping

from workloads.loading.tensor_table import MXFP4_GROUP
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.planning import Experts, Load, Part

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
}
MAY_BE_ZERO = ("num_mtp_layers", "num_dense_layers")


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


def divided(c: KimiK3Config) -> Mapping[str, int]:
    return {key: getattr(c, key) for key in ("num_heads", "kda_num_heads", "vocab_size")}


def experts(c: KimiK3Config) -> Experts:
    return Experts(
        count=c.num_experts,
        per_token=c.num_experts_per_token,
        layers=c.num_layers - c.num_dense_layers + c.num_mtp_layers,
        hidden=c.moe_latent_size,
        intermediate=c.moe_intermediate_size,
        quantization="mxfp4",
        keys={
            "count": "num_experts",
            "per_token": "num_experts_per_token",
            "hidden": "moe_latent_size",
            "intermediate": "moe_intermediate_size",
        },
    )


def derived(c: KimiK3Config, tp: int) -> list[Part]:
    """MLA's absorbed projections in BF16, and KDA's convolution weights regrouped for decoding in FP32."""
    full, linear = _attention_layers(c)
    absorbed = c.num_heads // tp * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    conv = 3 * c.kda_num_heads // tp * c.kda_head_dim * c.kda_conv_size
    nbytes = full * absorbed * 2 + linear * conv * 4
    return [Part("derived weights", "derived", nbytes, "absorbed MLA, KDA decode")]


def caches(c: KimiK3Config, load: Load, tp: int) -> list[Part]:
    """KV of MLA in BF16 (the latent is not split over TP), KDA state in FP32, convolution tails in BF16."""
    full, linear = _attention_layers(c)
    heads = c.kda_num_heads // tp
    state = linear * heads * c.kda_head_dim**2 * 4
    tail = linear * 3 * heads * c.kda_head_dim * (c.kda_conv_size - 1) * 2
    per_token = full * (c.kv_lora_rank + c.qk_rope_head_dim) * 2
    each = f"{load.requests} requests x {state + tail:,} B"
    return [
        Part("KV cache", "cache", load.tokens * per_token, f"{load.tokens:,} tokens x {per_token:,} B"),
        Part("KDA state", "cache", load.requests * (state + tail), each),
    ]


def _attention_layers(c: KimiK3Config) -> tuple[int, int]:
    """Numbers of MLA and of KDA layers, MTP blocks included."""
    layers = c.num_layers + c.num_mtp_layers
    full = sum(c.is_full_attention(layer) for layer in range(layers))
    return full, layers - full
