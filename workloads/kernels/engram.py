"""Engram: rows of large tables, found by hashes of the last few tokens, that gate a value into a residual stream.

Tokens whose texts differ in case, accents or blanks only count as one. The hashes follow from the dimensions and the
vocabulary alone, so that every rank finds the same rows.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from workloads.kernels.activations import sigmoid
from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.norm import rms_scale

SEED = 10007  # of a layer's multipliers: this times its number
SMALLEST_DOT = 1e-6  # below it a gate is the same on each side of zero
_BLANKS = re.compile(r"\s+")


def compressed_ids(texts: Iterable[str]) -> list[int]:
    """For each token's text a number, the same for texts that `normalised` makes equal, in order of appearance."""
    known: dict[str, int] = {}
    return [known.setdefault(normalised(text), len(known)) for text in texts]


def normalised(text: str) -> str:
    """Compatible forms composed (NFKC), accents dropped (NFD), lower case, each run of blanks one space."""
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    return _BLANKS.sub(" ", plain.lower())


def hash_multipliers(layer: int, tokens: int, vocabulary: int) -> list[int]:
    """An odd number for each of the last `tokens` tokens, so large that its product with an id below `vocabulary` stays
    below 2^63."""
    high = (2**63 - 1) // vocabulary // 2
    drawn = np.random.default_rng(SEED * layer).integers(0, high, size=tokens)
    return [2 * int(number) + 1 for number in drawn]


def last_tokens(ids: Tensor, count: int, tokens: int, padding: int) -> Tensor:
    """The last `tokens` ids of each of the last `count` tokens of a text, newest first: int64 [count, tokens].

    ids: int64 [S], S >= count, -1 for one that breaks the text. Where the text began or was broken since, there is
    `padding`.
    """
    missing = ids.new_full((max(0, count + tokens - 1 - len(ids)),), -1)
    known = torch.cat([missing, ids])[-(count + tokens - 1) :]
    found = known.unfold(0, tokens, 1).flip(-1)
    return found.masked_fill((found < 0).cumsum(dim=1) > 0, padding)


def ngram_rows(last: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """Which row of each head's part of a table belongs to each token: int64 [T, heads of all orders].

    last: int64 [T, N] from `last_tokens`. multipliers: int64 [N]. sizes, offsets: int64 [(N-1) * heads], of the parts
    of bigrams, then of trigrams and so on. The hash of n tokens is the XOR of their ids times multipliers.
    """
    products = last * multipliers
    rolled, rolls = products[:, 0], []
    for product in products.unbind(1)[1:]:
        rolled = rolled ^ product
        rolls.append(rolled)
    heads = len(sizes) // len(rolls)
    return torch.stack(rolls, dim=1).repeat_interleave(heads, dim=1).remainder(sizes) + offsets


def engram_gates(x: Tensor, keys: Tensor, weights: Sequence[Tensor], eps: float) -> Tensor:
    """How much of its value each copy takes: float64 [T, c].

    x, keys: BF16 [T, c, H]. weights: of the norms of both, BF16 [c, H] each. With the two normalised, dot their product
    over sqrt(H), the gate is sigmoid(sign(dot) sqrt(max(|dot|, 1e-6))).
    """
    scale = weights[0].to(torch.float64) * weights[1].to(torch.float64)

    def gates(copies: Tensor, of_copies: Tensor) -> Tensor:
        wide, key = copies.to(torch.float64), of_copies.to(torch.float64)
        norms = (rms_scale(wide, eps) * rms_scale(key, eps)).squeeze(-1)
        dot = (wide * key * scale).sum(dim=-1) * norms / math.sqrt(x.shape[-1])
        return sigmoid(torch.copysign(dot.abs().clamp(min=SMALLEST_DOT).sqrt(), dot))

    return by_rows(gates, x, keys)


def add_gated(x: Tensor, gates: Tensor, value: Tensor) -> Tensor:
    """x BF16 [T, c, H] plus gates [T, c] times value BF16 [T, H], BF16 rounded once."""
    return by_rows(
        lambda rows, gate, added: round_to_bf16(
            rows.to(torch.float64) + gate.unsqueeze(-1) * added.to(torch.float64).unsqueeze(1)
        ),
        x,
        gates,
        value,
    )
