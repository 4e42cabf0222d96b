"""Grouped-query attention, with a window of keys and with sinks where a model has them.

One function for prefill and for decode, which is prefill of one token. Nothing is rounded between its BF16 inputs and
its BF16 output; scores, softmax and sums are float64, so that neither the batch nor the sharding changes a result.
"""

import torch

from workloads.kernels.linear import round_to_bf16

_SCORE_BYTES = 8 << 20  # scores of one block of queries, which stay in the cache
_SCORE_ROWS = 256


def gqa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of a segment of one request.

    q: BF16 [T, N, D] at positions start..start+T-1. k, v: BF16 [S, KV, D] and [S, KV, V] of positions 0..S-1,
    S >= start+T, the segment's own included; N/KV neighbouring heads of queries share one of keys. Scores are scaled
    by D^-1/2. sinks: [N], a score of each head that takes part in the softmax and has no value. window: how many
    keys a query sees, its own the last. Returns BF16 [T, N, V].
    """
    tokens, heads, width = q.shape
    if k.shape[0] < start + tokens:
        raise ValueError(
            f"The segment ends at position {start + tokens} and the cache holds {k.shape[0]} positions; "
            "write the segment's keys and values to the cache before attending."
        )
    group = heads // k.shape[1]
    sink = q.new_full((heads,), -torch.inf, dtype=torch.float64) if sinks is None else sinks.to(torch.float64)
    queries = q.to(torch.float64) * width**-0.5
    seen = start + tokens if window is None else min(start + tokens, _SCORE_ROWS + window)
    rows = max(1, min(_SCORE_ROWS, _SCORE_BYTES // (8 * group * seen)))
    out = torch.empty(tokens, heads, v.shape[-1], dtype=torch.bfloat16, device=q.device)
    for row in range(0, tokens, rows):
        block = queries[row : row + rows]
        first, end = start + row, start + row + block.shape[0]
        begin = 0 if window is None else max(0, first - window + 1)
        hidden = _hidden(first, end, begin, window, q.device)
        for head in range(k.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            keys, values = (cached[begin:end, head].to(torch.float64) for cached in (k, v))
            out[row : row + rows, mine] = _attend(block[:, mine], keys, values, sink[mine], hidden)
    return out


def _hidden(first: int, end: int, begin: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [end-first, end-begin]: which of the keys begin..end-1 each of the queries first..end-1 must not see."""
    distance = torch.arange(first, end, device=device)[:, None] - torch.arange(begin, end, device=device)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Heads that share their keys: float64 q [R, G, D], k [S, D], v [S, V], sinks [G] -> BF16 [R, G, V]."""
    scores = (q @ k.t()).masked_fill_(hidden.unsqueeze(1), -torch.inf)
    most = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks.unsqueeze(1))
    weights = scores.sub_(most).exp_()
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sinks.unsqueeze(1) - most)
    return round_to_bf16((weights @ v) / total)
