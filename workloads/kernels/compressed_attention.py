"""Attention of DeepSeek-V4: keys of a window and compressed groups of earlier tokens, chosen by an indexer.

Keys are values too, one head of them for all heads of queries. Prefill and decode are the same functions on more or
fewer tokens; between BF16 or FP32 inputs and the caller's one rounding everything is float64.
"""

import math

import torch
from torch import Tensor

from workloads.kernels.linear import round_to_bf16
from workloads.kernels.quantization import (
    BLOCK,
    dequantize_mxfp4,
    dequantize_nvfp4_blocks,
    quantize_mxfp4,
    quantize_nvfp4_blocks,
)


def pool(kv: Tensor, scores: Tensor) -> Tensor:
    """One entry of each group: sum over its tokens of softmax(scores) * kv, channel by channel.

    kv, scores: float32 [G, R, d], -inf for a token that does not exist -> float64 [G, d].
    """
    return (scores.to(torch.float64).softmax(dim=1) * kv.to(torch.float64)).sum(dim=1)


def overlapping(groups: Tensor) -> Tensor:
    """Candidates of groups that overlap: [G+1, r, 2d], each group after the one before it -> [G, 2r, d].

    A group pools the first half of the channels of the previous group's tokens and the second half of its own.
    """
    width = groups.shape[-1] // 2
    return torch.cat([groups[:-1, :, :width], groups[1:, :, width:]], dim=1)


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] times the Hadamard matrix of order n (Sylvester's), divided by sqrt(n): float64; n a power of two."""
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"The Hadamard rotation takes a power of two of channels, not {size}.")
    wide = x.to(torch.float64)
    half = 1
    while half < size:
        low, high = torch.unbind(torch.unflatten(wide, -1, (size // (2 * half), 2, half)), -2)
        wide = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        half *= 2
    return wide / math.sqrt(size)


def through_fp4(x: Tensor) -> Tensor:
    """x [..., K] rotated by `hadamard`, rounded to BF16 and taken `through_mxfp4`: BF16 [..., K]."""
    return through_mxfp4(round_to_bf16(hadamard(x)))


def through_mxfp4(x: Tensor) -> Tensor:
    """x BF16 [..., K] quantised to MXFP4 and decoded: BF16 [..., K], exact. The last group may be partial."""
    short = -x.shape[-1] % BLOCK
    decoded = dequantize_mxfp4(*quantize_mxfp4(torch.nn.functional.pad(x.to(torch.float32), (0, short))))
    return decoded[..., : x.shape[-1]].to(torch.bfloat16)


def through_nvfp4(x: Tensor) -> Tensor:
    """x BF16 [..., K], K a multiple of 16, quantised to NVFP4 without a global scale and decoded: BF16, exact."""
    packed, scales = quantize_nvfp4_blocks(x, torch.ones((), device=x.device))
    return dequantize_nvfp4_blocks(packed, scales).to(torch.bfloat16)


def candidate_entries(scores: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    """bool [T, E]: the visible entries in the `blocks` blocks of `size` that hold the highest scores, the earlier of
    equals, and always in the block of the newest visible entry.

    scores: float64 [T, E]. visible: bool [T, E], the first entries of each token. The first of two levels of choice,
    so that later layers rank few entries.
    """
    entries = scores.shape[1]
    if entries <= blocks * size:
        return visible
    masked = torch.nn.functional.pad(
        scores.masked_fill(~visible, -torch.inf), (0, -entries % size), value=-torch.inf
    )
    best = torch.unflatten(masked, 1, (-1, size)).amax(dim=-1)
    newest = (visible.sum(dim=1, keepdim=True) - 1) // size
    best.masked_fill_(torch.arange(best.shape[1], device=best.device) == newest, torch.inf)
    order = best.sort(dim=-1, descending=True, stable=True).indices[:, :blocks]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
    return kept.repeat_interleave(size, dim=1)[:, :entries] & visible


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """How much each token wants each entry: sum over heads of weights[h] * relu(queries[h] . key).

    queries: [T, Hn, D] and keys [E, D] from `through_fp4`; weights: BF16 [T, Hn] -> float64 [T, E]. The published scale
    (D * Hn)^-1/2 does not change the order and is left out: without it the sums are exact, so that neither batch nor
    chunk decides between equals.
    """
    products = (queries.to(torch.float64) @ keys.to(torch.float64).t()).clamp_(min=0)  # [T, Hn, E]
    return (weights.to(torch.float64).unsqueeze(1) @ products).squeeze(1)


def best_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """bool [T, E]: the `count` visible entries of highest score, the earlier of equals; all, where there are fewer.

    scores: float64 [T, E]. visible: bool [T, E].
    """
    if scores.shape[1] <= count:
        return visible
    order = scores.masked_fill(~visible, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(visible).scatter_(1, order[:, :count], True) & visible


def sink_attention(queries: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """Attention with a sink: softmax over the seen keys and one score per head that has no value.

    queries: BF16 [T, n, d]. keys: BF16 [S, d], which are the values too. seen: bool [T, S]. sinks: float32 [n].
    Scores are scaled by d^-1/2. Returns float64 [T, n, d].
    """
    wide = keys.to(torch.float64)
    scores = (queries.to(torch.float64) / math.sqrt(queries.shape[-1])) @ wide.t()
    scores.masked_fill_(~seen.unsqueeze(1), -torch.inf)
    sink = sinks.to(torch.float64).view(1, -1, 1)
    most = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    weights = scores.sub_(most).exp_()
    return (weights @ wide) / (weights.sum(dim=-1, keepdim=True) + (sink - most).exp())
