"""Block lanes of the fingerprint: three 64-bit sums over every 128 KiB of bytes, on any device.

With w the little-endian 64-bit words of a block, K and K2 the key tables, `>>` arithmetic, and everything
modulo 2^64:

    t = w ^ K[position]      p = t * (t >> 32)
    s1 = sum p               s2 = sum p * K2[position]               s3 = sum t

s1 multiplies the two halves of each keyed word, as NH does (Black et al., UMAC, 1999). p alone can miss a
change inside one word (where t >> 32 is 0: 2^-32); s3 never does. Sign flips of two words always cancel
in s3, with 2^-32 in s1, and then survive in s2, whose odd weights differ from position to position.

All of it is elementwise int64 arithmetic and wrapping sums, associative and commutative: a kernel of any
launch shape, on any device, gives the same bits.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from collectors.byte_flags import Array, constant_rows, nan_rows, nan_tests

BLOCK_WORDS = 16384
BLOCK_BYTES = 8 * BLOCK_WORDS
_DEVICE_CHUNK_WORDS = 8 << 20  # bounds the temporaries on a device: three of 64 MiB
_SEED, _SEED2 = 0x6C61796572776973, 0x7265666974737461


class Rows(NamedTuple):
    """Of n rows: lanes int64 [n, 3]; nan bool [n]; constant int16 [n], the byte a row repeats or -1."""

    lanes: Array
    nan: Array
    constant: Array


def splitmix64(seed: int, count: int) -> Array:
    """uint64 [count]: the first outputs of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) from state `seed`."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=1)
def keys() -> tuple[Array, Array]:
    """K and K2 (odd), int64 [BLOCK_WORDS] each."""
    odd = splitmix64(_SEED2, BLOCK_WORDS) | np.uint64(1)
    return splitmix64(_SEED, BLOCK_WORDS).view(np.int64), odd.view(np.int64)


@lru_cache(maxsize=8)
def _device_keys(device: torch.device) -> tuple[Tensor, Tensor]:
    key, odd_key = keys()
    return torch.from_numpy(key).to(device), torch.from_numpy(odd_key).to(device)


class RowHasher:
    """Hashes rows of at most one block each. Holds scratch memory, so one thread at a time."""

    def __init__(self) -> None:
        self._t = np.empty(BLOCK_WORDS, np.int64)
        self._p = np.empty(BLOCK_WORDS, np.int64)

    def __call__(self, words: Tensor, nbytes: int, dtype: torch.dtype | None) -> Rows:
        """words: int64 [n, k], 0 < k <= BLOCK_WORDS, contiguous, of which the first nbytes of each row count
        and the rest is zero. dtype: whose NaN to look for; with None neither flag is computed."""
        if not words.is_cpu:
            return rows_by_torch(words, nbytes, dtype)
        array = words.numpy()
        lanes, nan = self._lanes(array, dtype)
        if dtype is None:
            return Rows(lanes, nan, np.full(len(nan), -1, np.int16))
        return Rows(lanes, nan, constant_rows(array.view(np.uint8)[:, :nbytes]))

    def _lanes(self, words: Array, dtype: torch.dtype | None) -> tuple[Array, Array]:
        n, k = words.shape
        lanes, nan = np.empty((n, 3), np.int64), np.zeros(n, np.bool_)
        tests = [(test, words.view(test.dtype)) for test in nan_tests(dtype)]
        key, odd_key = (table[:k] for table in keys())
        half = np.int64(32)
        group = BLOCK_WORDS // k  # rows per step: the temporaries stay in the L2 cache
        for start in range(0, n, group):
            w = words[start : start + group]
            rows = slice(start, start + len(w))
            t, p = (flat[: w.size].reshape(w.shape) for flat in (self._t, self._p))
            np.bitwise_xor(w, key, out=t)
            np.right_shift(t, half, out=p)
            np.multiply(t, p, out=p)
            lanes[rows, 0] = np.add.reduce(p, axis=1)
            lanes[rows, 1] = np.dot(p, odd_key)
            lanes[rows, 2] = np.add.reduce(t, axis=1)
            for test, values in tests:
                nan[rows] |= test.found(values[rows])
        return lanes, nan


def rows_by_torch(words: Tensor, nbytes: int, dtype: torch.dtype | None) -> Rows:
    """What `RowHasher` returns, by torch's operations on the device of `words`."""
    n, k = words.shape
    key, odd_key = (table[:k] for table in _device_keys(words.device))
    lanes = torch.empty((n, 3), dtype=torch.int64, device=words.device)
    nan = torch.zeros(n, dtype=torch.bool, device=words.device)
    constant = torch.full((n,), -1, dtype=torch.int16, device=words.device)
    group = max(1, _DEVICE_CHUNK_WORDS // k)
    for start in range(0, n, group):
        rows = slice(start, min(start + group, n))
        t = words[rows] ^ key
        p = (t >> 32).mul_(t)
        lanes[rows, 0] = p.sum(1)
        lanes[rows, 1] = p.mul_(odd_key).sum(1)
        lanes[rows, 2] = t.sum(1)
        if dtype is not None:
            nan[rows] = nan_rows(words[rows], dtype)
            octets = words[rows].view(torch.uint8)[:, :nbytes]
            same = (octets == octets[:, :1]).all(1)
            constant[rows] = torch.where(same, octets[:, 0].to(torch.int16), constant[rows])
    return Rows(lanes.cpu().numpy(), nan.cpu().numpy(), constant.cpu().numpy())
