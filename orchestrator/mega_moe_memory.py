"""What MegaMoE holds on one rank beside the experts' weights, by the kernel that a backend plans for."""

from functools import cache
from math import ceil

from workloads.kernels import mega_moe_hopper_sizes as hopper
from workloads.kernels.moe_choice import (
    DEEP_GEMM_SM100,
    HOPPER,
    SHARED_PARAMETERS,
    SITU_PARAMETERS,
    SM90_ENTRY_POINTS,
    SM100_ENTRY_POINTS,
    Choice,
    Machine,
)
from workloads.models.planning import Experts, Part, chosen_kernel
from workloads.spec import Backend, Parallelism

BLOCK_M = (8, 16, 32, 64, 96, 128, 192)  # token tiles that DeepGEMM 26/07 chooses from
TOKEN_MULTIPLE = 384  # their least common multiple: token capacities are rounded up to it
SM100_MULTIPROCESSORS = 148
#: GPUs with everything that the kernels need: what is planned for. The ranks look at what really is there.
_COMPLETE = {
    "sm90": Machine((9, 0), dict.fromkeys(SM90_ENTRY_POINTS, ()), nvcc=True),
    "sm100": Machine((10, 0), dict.fromkeys(SM100_ENTRY_POINTS, (*SITU_PARAMETERS, *SHARED_PARAMETERS))),
}

Tensors = tuple[
    int, int, int, int
]  # bytes of w13, its scales, w2, its scales of one layer's experts, as loaded


def planned_kernel(experts: Experts | None, layout: Parallelism, backend: Backend) -> Choice:
    """The kernel that serves where a GPU of `backend.arch` has all that it needs."""
    machine = _COMPLETE.get(backend.arch, Machine())
    return chosen_kernel(experts, backend.moe_kernel, layout.redundant_experts, layout.ep, machine)


def parts(
    experts: Experts, layout: Parallelism, backend: Backend, inner: int, tensors: Tensors
) -> list[Part]:
    """What is held beside weights as they are loaded. inner: intermediate size, padded."""
    kernel = planned_kernel(experts, layout, backend).kernel
    slots = (experts.count + layout.redundant_experts) // layout.ep
    w13, w13_scale, _, w2_scale = tensors
    if kernel != HOPPER:
        buffer = [_symmetric_buffer(experts, layout, backend, inner)] if kernel == DEEP_GEMM_SM100 else []
        copies = w13 + w13_scale + w2_scale  # w2 is an alias
        return [*buffer, Part("finalise peak", "peak", copies, "one layer's experts in both layouts")]
    packed = hopper.layer_bytes(slots, experts.hidden, inner)
    added = experts.layers * (packed - sum(tensors))
    return [
        Part("packed experts", "derived", added, "a byte more for each row than as loaded"),
        *_hopper_passes(experts, layout, backend, inner, slots),
        Part(
            "finalise peak",
            "peak",
            packed + pack_bytes(experts, inner),
            "one layer's experts in both layouts",
        ),
    ]


def pack_bytes(experts: Experts, inner: int) -> int:
    """What our kernel's layout takes while the larger matrix of one expert is brought into it."""
    return hopper.PACK_BYTES * 2 * inner * experts.hidden


def _hopper_passes(
    experts: Experts, layout: Parallelism, backend: Backend, inner: int, slots: int
) -> list[Part]:
    """The workspace of a call and, where ranks exchange rows, those rows; should all tokens choose this rank."""
    tokens, hidden = backend.max_batch_tokens, experts.hidden
    exchanges = layout.ep > 1 or bool(experts.fused_shared)
    rows = tokens * layout.ep * min(experts.per_token, slots)
    _, workspace = hopper.workspace(rows, slots, hidden, inner, combine=not exchanges)
    found = [Part("MegaMoE workspace", "buffer", workspace, f"{rows:,} rows, should all choose this rank")]
    if exchanges:
        # As they arrive, in the order of the experts, and results there and back; results of the own tokens twice.
        exchanged = rows * 6 * hidden + tokens * experts.per_token * 4 * hidden
        found.append(Part("exchanged rows", "buffer", exchanged, f"{tokens} tokens a pass, EP{layout.ep}"))
    return found


def _symmetric_buffer(experts: Experts, layout: Parallelism, backend: Backend, inner: int) -> Part:
    nbytes = mega_moe_buffer_bytes(
        tokens=backend.max_batch_tokens,
        ranks=layout.ep,
        topk=experts.per_token,
        experts=experts.count + layout.redundant_experts,
        hidden=experts.hidden,
        intermediate=inner,
        sms=SM100_MULTIPROCESSORS,
        shared=experts.fused_shared,
    )
    return Part(
        "MegaMoE buffer", "buffer", nbytes, f"{backend.max_batch_tokens} tokens a pass, EP{layout.ep}"
    )


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
    tokens: int,
    ranks: int,
    topk: int,
    experts: int,
    hidden: int,
    intermediate: int,
    sms: int,
    shared: int = 0,
) -> int:
    """Bytes of DeepGEMM's symmetric buffer on one rank, FP8 activations.

    tokens: largest number of one forward pass; hidden, intermediate: of the routed experts; shared: intermediate size
    of the shared ones, if the kernel computes them.
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
    own = ceil(tokens / 8) * 128 * (hidden + shared) // 32 + tokens * shared if shared else 0
    combine = (topk + bool(shared)) * tokens * 2 * hidden
    return workspace + inputs + rings + own + combine


def _round_up(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple
