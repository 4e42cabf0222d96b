"""Grouped-query attention, the same for prefill and decode: float64 between its BF16 inputs and its one rounding."""

import torch
from torch import Tensor

from workloads.kernels.mla import causal_attention


def gqa_attention(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention of consecutive tokens of one request, with scores scaled by D^-1/2.

    q: BF16 [T, heads, D] at positions start..start+T-1. keys, values: BF16 [S, KV heads, D] of positions 0..S-1,
    S >= start+T, the tokens' own included. Query head h reads KV head h // (heads / KV heads). Returns BF16
    [T, heads, D]. ValueError when positions are missing.
    """
    tokens, heads, width = q.shape
    end = start + tokens
    if keys.shape[0] < end:
        raise ValueError(
            f"The tokens end at position {end} and the cache holds {keys.shape[0]} positions; write their keys and "
            "values to the cache before attending."
        )
    wide_keys, wide_values = keys[:end].to(torch.float64), values[:end].to(torch.float64)
    queries = q.to(torch.float64) * width**-0.5
    out = torch.empty_like(q)
    sharing = heads // keys.shape[1]
    for head in range(heads):
        of = head // sharing
        out[:, head] = causal_attention(queries[:, head], wide_keys[:, of], wide_values[:, of], start)
    return out
