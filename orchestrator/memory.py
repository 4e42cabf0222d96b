"""What one rank holds, part by part, from a model's dimensions: weights, kernel buffer, caches, peaks."""

import os
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from orchestrator.schema import Root
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.tensors import MXFP4_GROUP, bytes_by_component
from workloads.spec import Backend, Parallelism

BLOCK_M = (8, 16, 32, 64, 96, 128, 192)  # token tiles that DeepGEMM 26/07 chooses from
TOKEN_MULTIPLE = 384  # their least common multiple: token capacities are rounded up to it
SM100_MULTIPROCESSORS = 148
EXPERT_ALIGNMENT = {"cpu": 128, "sm100": 512}  # of both expert dimensions under MegaMoE

# Beside weights and caches. CUDA: context, NCCL's channels, the activations of one batch, graph pools.
# CPU: the private pages of a forked process that works with torch.
RESERVE_BYTES = {"cuda": 6_000_000_000, "cpu": 200_000_000}
COMPONENT_NAMES = {
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


@dataclass(frozen=True)
class Part:
    """`kind`: weights | padding | derived | buffer | peak | cache | reserve. `basis`: what the bytes follow from."""

    name: str
    kind: str
    nbytes: int
    basis: str = ""


def memory_parts(root: Root) -> list[Part]:
    """Everything that one rank holds at its fullest moment, largest weights first."""
    model, layout, backend = root.model.kimi_k3, root.parallelism, root.backend
    parts = [*_weights(model, layout), *_expert_padding(model, layout, backend), _derived(model, layout)]
    if backend.moe_kernel == "mega_moe":
        parts += [*_symmetric_buffer(model, layout, backend), _finalise_peak(model, layout, backend)]
    reserve = Part(
        "reserve", "reserve", RESERVE_BYTES[backend.device], f"{backend.device} runtime, activations"
    )
    return [*parts, *_caches(model, layout, backend), reserve]


def total(parts: list[Part], *kinds: str) -> int:
    """Bytes of the parts of these kinds, of all without any."""
    return sum(part.nbytes for part in parts if not kinds or part.kind in kinds)


def update_bytes(root: Root) -> int:
    """What an update needs on top of serving, for the expert parameters that finalising consumed.

    Layerwise: one layer's tensors wait until all have arrived, then are loaded into as much fresh memory.
    Direct: the parameters of all layers come back for the length of the load; W2 still lies in its loaded layout.
    """
    if root.backend.moe_kernel != "mega_moe":
        return 0
    model = root.model.kimi_k3
    w13, w13_scale, w2, w2_scale = _expert_tensors(model, root.parallelism, root.backend)
    layers = model.num_layers - model.num_dense_layers + model.num_mtp_layers
    needs = {
        "layerwise": 2 * (w13 + w13_scale + w2 + w2_scale),
        "direct": layers * (w13 + w13_scale + w2_scale),
    }
    return max((needs[step.via] for step in root.load_path.steps if step.do == "update"), default=0)


def machine_bytes() -> int:
    """Memory of this machine, or of the container that limits it."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    found = [text for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([installed, *(int(text) for text in found)])


def padded_intermediate(model: KimiK3Config, backend: Backend) -> int:
    """Intermediate size of the experts after padding for the kernel's tiles."""
    multiple = EXPERT_ALIGNMENT.get(backend.arch, 1) if backend.moe_kernel == "mega_moe" else 1
    return ceil(model.moe_intermediate_size / multiple) * multiple


def _weights(model: KimiK3Config, layout: Parallelism) -> list[Part]:
    by_component = _components(repr(model), model, layout.tp, layout.ep)
    basis = {"routed_experts": f"{model.num_experts // layout.ep} of {model.num_experts} experts a layer"}
    split = f"split over TP{layout.tp}" if layout.tp > 1 else ""
    basis |= dict.fromkeys(("kda", "mla", "embedding", "head"), split)
    return [
        Part(COMPONENT_NAMES.get(name, name), "weights", nbytes, basis.get(name, "replicated"))
        for name, nbytes in sorted(by_component.items(), key=lambda item: -item[1])
    ]


_COMPONENTS: dict[tuple[str, int, int], dict[str, int]] = {}  # a sweep asks for few models thousands of times


def _components(key: str, model: KimiK3Config, tp: int, ep: int) -> dict[str, int]:
    if (key, tp, ep) not in _COMPONENTS:
        _COMPONENTS[key, tp, ep] = bytes_by_component(model, tp, ep)
    return _COMPONENTS[key, tp, ep]


def _expert_tensors(model: KimiK3Config, layout: Parallelism, backend: Backend) -> tuple[int, int, int, int]:
    """Bytes of w13, its scales, w2, its scales of one layer's local experts, padded."""
    inner = padded_intermediate(model, backend)
    values = model.num_experts // layout.ep * inner * model.moe_latent_size
    return values, 2 * values // MXFP4_GROUP, values // 2, values // MXFP4_GROUP


def _expert_padding(model: KimiK3Config, layout: Parallelism, backend: Backend) -> list[Part]:
    inner, padded = model.moe_intermediate_size, padded_intermediate(model, backend)
    if padded == inner:
        return []
    layers = model.num_layers - model.num_dense_layers + model.num_mtp_layers
    full = layers * sum(_expert_tensors(model, layout, backend))
    basis = f"intermediate {inner} -> {padded}"
    return [Part("expert padding", "padding", full * (padded - inner) // padded, basis)]


def _derived(model: KimiK3Config, layout: Parallelism) -> Part:
    """MLA's absorbed projections in BF16, and KDA's convolution weights regrouped for decoding in FP32."""
    full, linear = _attention_layers(model)
    absorbed = model.num_heads // layout.tp * model.kv_lora_rank * (model.qk_nope_head_dim + model.v_head_dim)
    conv = 3 * model.kda_num_heads // layout.tp * model.kda_head_dim * model.kda_conv_size
    return Part(
        "derived weights", "derived", full * absorbed * 2 + linear * conv * 4, "absorbed MLA, KDA decode"
    )


def _finalise_peak(model: KimiK3Config, layout: Parallelism, backend: Backend) -> Part:
    """L2's weight is aliased; L1's weight and both scales are fresh copies while the raw ones still live."""
    w13, w13_scale, _, w2_scale = _expert_tensors(model, layout, backend)
    return Part("finalise peak", "peak", w13 + w13_scale + w2_scale, "one layer's experts in both layouts")


def _caches(model: KimiK3Config, layout: Parallelism, backend: Backend) -> list[Part]:
    """KV of MLA in BF16 (the latent is not split over TP), KDA state in FP32, convolution tails in BF16."""
    full, linear = _attention_layers(model)
    requests, tokens = backend.max_requests, backend.max_requests * backend.max_model_len
    heads = model.kda_num_heads // layout.tp
    state = linear * heads * model.kda_head_dim**2 * 4
    tail = linear * 3 * heads * model.kda_head_dim * (model.kda_conv_size - 1) * 2
    per_token = full * (model.kv_lora_rank + model.qk_rope_head_dim) * 2
    return [
        Part("KV cache", "cache", tokens * per_token, f"{tokens:,} tokens x {per_token:,} B"),
        Part("KDA state", "cache", requests * (state + tail), f"{requests} requests x {state + tail:,} B"),
    ]


def _symmetric_buffer(model: KimiK3Config, layout: Parallelism, backend: Backend) -> list[Part]:
    if backend.arch != "sm100":
        return []  # the CPU reference exchanges through ordinary tensors
    nbytes = mega_moe_buffer_bytes(
        tokens=backend.max_batch_tokens,
        ranks=layout.ep,
        topk=model.num_experts_per_token,
        experts=model.num_experts,
        hidden=model.moe_latent_size,
        intermediate=padded_intermediate(model, backend),
        sms=SM100_MULTIPROCESSORS,
    )
    return [
        Part("MegaMoE buffer", "buffer", nbytes, f"{backend.max_batch_tokens} tokens a pass, EP{layout.ep}")
    ]


@cache
def mega_moe_ring_tokens(
    tokens: int, ranks: int, topk: int, experts: int, hidden: int, intermediate: int, sms: int
) -> int:
    """Tokens that DeepGEMM 26/07's ring between dispatch and the second GEMM must hold: over the tile heights,
    the blocks that its interleaved scheduler can have between first and last use."""
    local, clusters, n1, n2 = experts // ranks, sms // 2, 2 * intermediate // 256, hidden // 256
    most = 0
    for block_m in BLOCK_M:
        blocks = ceil(tokens * ranks * min(topk, local) / block_m) + local
        warm = max(
            ceil(ceil(clusters / n2) * n1 / clusters),
            ceil((n1 + (blocks - 1) * max(n1 - n2, 0)) / clusters) + 1,
        )
        warm = min(warm, ceil(blocks * n1 / clusters))
        live = ceil(min(warm * clusters, blocks * n1) / n1) + ceil(clusters / min(n1, n2))
        live += ceil(blocks * (n2 - n1) / n2) if n2 > n1 else 0
        most = max(most, min(blocks, live) * block_m)
    return _round_up(most, TOKEN_MULTIPLE)


@cache
def mega_moe_buffer_bytes(
    tokens: int, ranks: int, topk: int, experts: int, hidden: int, intermediate: int, sms: int
) -> int:
    """Bytes of DeepGEMM's symmetric buffer on one rank, FP8 activations, no fused shared expert.

    tokens: largest number of one forward pass; hidden, intermediate: of the routed experts.
    """
    tokens, local = _round_up(tokens, TOKEN_MULTIPLE), experts // ranks
    ring = mega_moe_ring_tokens(tokens, ranks, topk, experts, hidden, intermediate, sms)
    received = tokens * ranks * min(topk, local)
    pool = max(_round_up(received + local * (block_m - 1), block_m) for block_m in BLOCK_M)
    scale_rows = max(ceil(ring / block_m) * _round_up(block_m, 128) for block_m in BLOCK_M)
    workspace = 128 + 16 * experts + 8 * local + 2 * ring + 4 * ceil(tokens / 8)
    workspace += 4 * local * ranks**2 * tokens + 12 * pool
    inputs = tokens * (hidden + hidden // 32 + 12 * topk)
    rings = ring * (hidden + intermediate + 4) + scale_rows * (hidden + intermediate) // 32
    combine = topk * tokens * 2 * hidden
    return workspace + inputs + rings + combine


def _attention_layers(model: KimiK3Config) -> tuple[int, int]:
    """Numbers of MLA and of KDA layers, MTP blocks included."""
    layers = model.num_layers + model.num_mtp_layers
    full = sum(model.is_full_attention(layer) for layer in range(layers))
    return full, layers - full


def _round_up(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple
