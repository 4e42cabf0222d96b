"""Multi-head latent attention without rotation: expanded for prefill, absorbed for decode.

Neither form rounds between its BF16 inputs and its BF16 output (a GPU prefill would round the expanded keys
and values), so both compute the same real numbers in float64, to about 1e-14, and agree bit for bit once rounded.
"""

from collections.abc import Sequence

import torch

from workloads.kernels.linear import linear_partial, round_to_bf16

_SCORE_BYTES = 8 << 20  # scores of one block of queries
_SCORE_ROWS = 256  # of that block at most: its own end is where it computes scores in vain


def split_kv_b(kv_b_weight: torch.Tensor, num_heads: int, nope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK_T [N,P,L] and W_UV [N,L,V] of kv_b_proj's weight [N*(P+V),L], as contiguous copies.

    Copies, never views, for any number of heads: what decode reads has its own storage, to be refreshed.
    """
    per_head = kv_b_weight.view(num_heads, -1, kv_b_weight.shape[1])
    w_uk_t, w_uv = per_head[:, :nope_dim], per_head[:, nope_dim:].transpose(1, 2)
    contiguous = torch.contiguous_format
    return w_uk_t.clone(memory_format=contiguous), w_uv.clone(memory_format=contiguous)


def mla_expanded(
    q: torch.Tensor, c: torch.Tensor, k_pe: torch.Tensor, kv_b_weight: torch.Tensor, start: int
) -> torch.Tensor:
    """Causal attention of a segment of one request, with keys and values expanded from the latents.

    q: BF16 [T,N,P+R] at positions start..start+T-1. c: BF16 [S,L] normalised latents and k_pe: BF16 [S,R] of
    positions 0..S-1, S >= start+T, the segment's own included. kv_b_weight: BF16 [N*(P+V),L].
    Scores are scaled by (P+R)^-1/2. Returns BF16 [T,N,V].
    """
    tokens, heads, width = q.shape
    end = start + tokens
    if c.shape[0] < end:
        raise ValueError(
            f"The segment ends at position {end} and the cache holds {c.shape[0]} positions; "
            "write the segment's latents to the cache before attending."
        )
    nope = width - k_pe.shape[1]
    expanded = linear_partial(c[:end], kv_b_weight).view(end, heads, kv_b_weight.shape[0] // heads)
    shared = k_pe[:end].to(torch.float64)
    queries = q.to(torch.float64) * width**-0.5
    out = torch.empty(tokens, heads, expanded.shape[-1] - nope, dtype=torch.bfloat16, device=q.device)
    for head in range(heads):
        keys = torch.cat([expanded[:, head, :nope], shared], dim=1)
        out[:, head] = _causal(queries[:, head], keys, expanded[:, head, nope:], start)
    return out


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """One head: queries float64 [T,D] at positions start..start+T-1, keys [S,D], values [S,V] -> BF16 [T,V].

    A block of queries at a time, which sees the keys up to its own end; the scores of a block stay in the cache.
    """
    rows = max(1, min(_SCORE_ROWS, _SCORE_BYTES // (8 * max(1, keys.shape[0]))))
    future = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu_(1)
    out = torch.empty(queries.shape[0], values.shape[1], dtype=torch.bfloat16, device=queries.device)
    for row in range(0, queries.shape[0], rows):
        block = queries[row : row + rows]
        first, start = start, start + block.shape[0]
        scores = block @ keys[:start].t()
        scores[:, first:].masked_fill_(future[: block.shape[0], : block.shape[0]], -torch.inf)
        scores -= scores.amax(dim=1, keepdim=True)
        weights = scores.exp_()
        attended = (weights @ values[:start]) / weights.sum(dim=1, keepdim=True)
        out[row : row + rows] = round_to_bf16(attended)
    return out


def mla_absorbed(
    q: torch.Tensor,
    c_cache: torch.Tensor | Sequence[torch.Tensor],
    k_pe_cache: torch.Tensor | Sequence[torch.Tensor],
    w_uk_t: torch.Tensor,
    w_uv: torch.Tensor,
    lengths: Sequence[int],
    gain: float = 1.0,
) -> torch.Tensor:
    """Attention of one token of each of B requests, in the latent space.

    q: BF16 [B,N,P+R]. c_cache, k_pe_cache: BF16 [B,S,L] and [B,S,R], or per request [S_b,L] and [S_b,R].
    lengths: positions to attend to per request, the current token's included. w_uk_t, w_uv: from `split_kv_b`.
    Scores are scaled by gain * (P+R)^-1/2. Requests are computed one by one, so none depends on the others of its
    batch. Returns BF16 [B,N,V].
    """
    up_k, up_v = w_uk_t.to(torch.float64), w_uv.to(torch.float64)
    nope = up_k.shape[1]
    out = torch.empty(q.shape[0], up_v.shape[0], up_v.shape[2], dtype=torch.bfloat16, device=q.device)
    for b, length in enumerate(lengths):
        query = q[b].to(torch.float64) * (gain * q.shape[-1] ** -0.5)
        latents = c_cache[b][:length].to(torch.float64)
        shared = k_pe_cache[b][:length].to(torch.float64)
        latent_query = (query[:, None, :nope] @ up_k).squeeze(1)
        scores = latent_query @ latents.t() + query[:, nope:] @ shared.t()
        attended = scores.softmax(dim=-1) @ latents
        out[b] = round_to_bf16((attended.unsqueeze(1) @ up_v).squeeze(1))
    return out


def mla_output(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """o BF16 [T,N,V] times sigmoid(gate BF16 [T,N,V]), as BF16 [T,N,V]."""
    return round_to_bf16(o.to(torch.float64) * torch.sigmoid(gate.to(torch.float64)))
