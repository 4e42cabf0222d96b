"""Sums of rows: the arithmetic of the fingerprint, 16 integer dot products for every 4 KiB of bytes.

A row is ROW_BYTES bytes, read as int8. Its sums are the exact products with the 16 columns of a fixed key
matrix, int32: at most 4096 * 128 * 64 = 2^25, so nothing overflows, and a kernel of any launch shape, on any
device, in any order of summation, gives the same bits. The sums of 64 rows can be folded: each column's are
multiplied by fixed odd factors and added modulo 2^64, so that a device need not store them.

Why it is enough: for two different rows and keys drawn at random, one column agrees with probability at most
1/128 (whatever the other 4095 keys, one difference times its key can fill the gap for one value at most).
Folded, a column whose sums differ agrees for a single row never, its factor being odd, and for more with at most
2^-37: a difference is below 2^27, so it has at most 26 factors of two, and one factor in 2^(63 - 26) can fill the
gap. So all 16 agree with at most (2^-7 + 2^-37)^16, about 2^-112. Keys are 7-bit, [-64, 63], because integer matrix
products saturate 16-bit pairs of wider factors on processors without VNNI instructions, and would give other bits
there.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from collectors.byte_flags import Array, nan_rows, sum_is_finite

ROW_BYTES = 4096
SUMS = 16
SUM_BYTES = 4 * SUMS  # of one row
_ROWS_AT_ONCE = 256  # 1 MiB: stays in the L2 cache between the product and the search for NaN
_ROWS_AT_ONCE_OF_THREADS = 2048  # 8 MiB: they wait for each other after each product, which costs more
GROUP = 64  # rows whose sums are added up where a leaf has more
GROUP_BYTES = GROUP * ROW_BYTES
FOLD_BYTES = 8 * SUMS  # of one group's sums
MOST_BYTES = 4096  # of one leaf's last sums; more are hashed again, so that a device returns little
_FOLD_SEED = 0x666F6C6473
_SEED = 0x7265666974737461


def splitmix64(seed: int, count: int) -> Array:
    """uint64 [count]: the first outputs of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) from state `seed`."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=32)
def keys(level: int, device: torch.device) -> Tensor:
    """int8 [ROW_BYTES, SUMS] in [-64, 63], column by column in memory, as the tensor cores of a GPU read them:
    the upper seven bits of successive bytes, little-endian, of the generator seeded with _SEED + level. Every
    level has keys of its own, independent of what it hashes."""
    octets = splitmix64(_SEED + level, ROW_BYTES * SUMS // 8).astype("<u8").view(np.uint8)
    columns = (octets >> 1).astype(np.int8) - np.int8(64)
    # Copied, as memory of torch is aligned: a device counts addresses from here.
    return torch.from_numpy(columns.reshape(SUMS, ROW_BYTES)).to(device, copy=True).t()


@lru_cache(maxsize=32)
def factors(level: int, device: torch.device) -> Tensor:
    """int64 [GROUP, SUMS], odd: what the generator seeded with _FOLD_SEED + level gives, with the lowest bit set."""
    words = splitmix64(_FOLD_SEED + level, GROUP * SUMS) | np.uint64(1)
    return torch.from_numpy(words.view(np.int64).reshape(GROUP, SUMS)).to(device)


def fold(sums: Tensor, level: int) -> Tensor:
    """int64 [n, k, SUMS] of int32 [n, k * GROUP, SUMS] on the CPU: of every group the sum of the rows' sums times
    `factors`, modulo 2^64."""
    groups = sums.view(len(sums), -1, GROUP, SUMS).numpy().astype(np.int64)
    return torch.from_numpy(np.einsum("ngrc,rc->ngc", groups, factors(level, sums.device).numpy()))


def row_sums(rows: Tensor, level: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """int32 [n, SUMS] for uint8 rows [n, ROW_BYTES] on the CPU, and bool [n]: which rows hold a NaN of `dtype`."""
    signed, key = rows.view(torch.int8), keys(level, rows.device)
    step = _ROWS_AT_ONCE if torch.get_num_threads() == 1 else _ROWS_AT_ONCE_OF_THREADS
    sums = torch.empty((len(rows), SUMS), dtype=torch.int32, device=rows.device)
    nan = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        torch._int_mm(signed[part], key, out=sums[part])
        if dtype is not None and not sum_is_finite(rows[part], dtype):
            nan[part] = nan_rows(rows[part], dtype)
    return sums, nan
