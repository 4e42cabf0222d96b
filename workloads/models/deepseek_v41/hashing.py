"""Sizes of the tables of hashed n-grams, by layer. Imports no torch: the planner needs them too."""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

from workloads.models.deepseek_v41.config import DeepseekV41Config


def head_sizes(c: DeepseekV41Config, layer: int) -> Sequence[int]:
    """Rows of each part of a layer's table, bigrams first: the primes from `engram_vocab_size` on, of which each layer
    takes the next, so that no two parts of the model are of one size."""
    place = sorted(c.engram_layers).index(layer)
    primes = _primes(c.engram_vocab_size, len(c.engram_layers) * c.engram_heads)
    return primes[place * c.engram_heads : (place + 1) * c.engram_heads]


@lru_cache(maxsize=8)  # a plan asks often, and at full size they take a second
def _primes(start: int, count: int) -> tuple[int, ...]:
    """The first primes from `start` on."""
    found: list[int] = []
    while len(found) < count:
        if start > 1 and all(start % divisor for divisor in range(2, isqrt(start) + 1)):
            found.append(start)
        start += 1
    return tuple(found)
