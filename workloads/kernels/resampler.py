"""Attention of learned queries to what they summarise: no mask, no positions of its own."""

import torch

from workloads.kernels.linear import round_to_bf16


def cross_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """q BF16 [Q, W], k and v BF16 [S, W] -> BF16 [Q, W], rounded once.

    Every head has W/heads neighbouring channels; its scores are scaled by (W/heads)^-1/2.
    """
    queries, keys, values = (x.to(torch.float64).view(len(x), heads, -1).transpose(0, 1) for x in (q, k, v))
    scores = queries @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5
    return round_to_bf16((scores.softmax(dim=-1) @ values).transpose(0, 1).flatten(1))
