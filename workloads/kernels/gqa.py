"""Grouped-query attention, with a window of keys and with sinks where a model has them.

One function for prefill and for decode, which is prefill of one token. Nothing is rounded between its BF16 inputs and
its BF16 output; scores, softmax and sums are float64, so that neither the batch nor the sharding changes a result.
"""

import torch
from torch import Tensor

from workloads.kernels.linear import round_to_bf16

_SCORE_BYTES = 8 << 20  # scores of one block of queries, which stay in the cache
_SCORE_ROWS = 256


def gqa_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of consecutive tokens of one request, with scores scaled by D^-1/2.

    q: BF16 [T, heads, D] at positions start..start+T-1. keys, values: BF16 [S, KV heads, D] and [S, KV heads, V] of
    positions 0..S-1, S >= start+T, the tokens' own included. Query head h reads KV head h // (heads / KV heads).
    sinks: [heads], a score that takes part in the softmax of its head and has no value. window: how many keys a
    query sees, its own the last. Returns BF16 [T, heads, V]. ValueError when positions are missing.
    """
    tokens, heads, width = q.shape
    if keys.shape[0] < start + tokens:
        raise ValueError(
            f"The tokens end at position {start + tokens} and the cache holds {keys.shape[0]} positions; write their "
            "keys and values to the cache before attending."
        )
    sharing = heads // keys.shape[1]
    sink = q.new_full((heads,), -torch.inf, dtype=torch.float64) if sinks is None else sinks.to(torch.float64)
    queries = q.to(torch.float64) * width**-0.5
    seen = start + tokens if window is None else min(start + tokens, _SCORE_ROWS + window)
    rows = max(1, min(_SCORE_ROWS, _SCORE_BYTES // (8 * sharing * seen)))
    out = torch.empty(tokens, heads, values.shape[-1], dtype=torch.bfloat16, device=q.device)
    for row in range(0, tokens, rows):
        block = queries[row : row + rows]
        first, end = start + row, start + row + block.shape[0]
        begin = 0 if window is None else max(0, first - window + 1)
        hidden = _hidden(first, end, begin, window, q.device)
        for head in range(keys.shape[1]):
            mine = slice(head * sharing, (head + 1) * sharing)
            k, v = (cached[begin:end, head].to(torch.float64) for cached in (keys, values))
            out[row : row + rows, mine] = _attend(block[:, mine], k, v, sink[mine], hidden)
    return out


def _hidden(first: int, end: int, begin: int, window: int | None, device: torch.device) -> Tensor:
    """bool [end-first, end-begin]: which of the keys begin..end-1 each of the queries first..end-1 must not see."""
    distance = torch.arange(first, end, device=device)[:, None] - torch.arange(begin, end, device=device)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, hidden: Tensor) -> Tensor:
    """Heads that share their keys: float64 q [R, G, D], k [S, D], v [S, V], sinks [G] -> BF16 [R, G, V]."""
    scores = (q @ k.t()).masked_fill_(hidden.unsqueeze(1), -torch.inf)
    most = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks.unsqueeze(1))
    weights = scores.sub_(most).exp_()
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sinks.unsqueeze(1) - most)
    return round_to_bf16((weights @ v) / total)
