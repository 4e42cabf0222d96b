"""Choose tokens from logits, so that a choice depends on nothing but the request's own logits and counters."""

import hashlib
from collections.abc import Sequence

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Most probable ids int64 [B] of logits [B,V]; the lowest id among equals."""
    return logits.argmax(dim=-1)


def uniform(seed: int, request_id: str, position: int) -> float:
    """A number in [0, 1), a multiple of 2^-53, that is a hash of its arguments.

    There is no generator to advance: a request draws the same numbers on any rank and in any batch.
    """
    key = (
        f"{seed}/{position}/{request_id}".encode()
    )  # the id comes last, so that no two triples spell one key
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    temperature: float,
    seed: int,
    request_ids: Sequence[str],
    positions: Sequence[int],
) -> torch.Tensor:
    """One id per request from softmax(logits / temperature), by inversion of its distribution function.

    logits: [B,V]. request_ids, positions: B each; position is the index of the token that is chosen.
    temperature 0 is `greedy`. Returns int64 [B] on the logits' device.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or positive.")
    if temperature == 0:
        return greedy(logits)
    # On the CPU and row by row: a running sum on a GPU may differ between runs, and between batch shapes.
    rows = logits.detach().to("cpu", torch.float64)
    chosen = [
        _invert(row / temperature, uniform(seed, request_id, position))
        for row, request_id, position in zip(rows, request_ids, positions, strict=True)
    ]
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


def _invert(scores: torch.Tensor, u: float) -> int:
    """The first id whose cumulated probability exceeds u; one of probability zero is never chosen.

    Without a distribution (a NaN or an infinite score) the choice is greedy: the tokens of a model with broken
    weights are evidence, and have to be valid ids.
    """
    cumulated = (scores - scores.max()).exp().cumsum(dim=0)
    if cumulated[-1].isnan():
        return int(greedy(scores))
    return int(torch.searchsorted(cumulated, u * cumulated[-1], right=True))


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable tokens of each row of logits [B,V], most probable first, the lower id among equals.

    Returns ids int64 [B,k] and natural log-probabilities float32 [B,k]. Order is decided on the logits themselves.
    Log-probabilities are computed in float64 to a relative error near 1e-15, those close to zero included, and
    rounded once: the order in which a batch shape or a number of threads adds up the normaliser does not show.
    """
    values, ids = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
    below = values - values[:, :1]
    others = below[:, 1:].exp().sum(dim=-1, keepdim=True)
    return ids[:, :k].contiguous(), (below[:, :k] - others.log1p()).to(torch.float32)
