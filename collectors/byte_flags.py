"""What raw bytes say beside their digest: whether rows hold NaN, and which byte they repeat.

NaN is looked for in the bit patterns: by the extremes of the bits read as integers, which reads memory and
writes none, and exists for every dtype, unlike isnan. A sum, which runs on all threads, shows first that most
rows have none.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

# Bits of a value, and those of the largest magnitude that is not NaN (infinity, where there is one).
_SIGNED_NAN: dict[torch.dtype, tuple[int, int]] = {
    torch.bfloat16: (16, 0x7F80),
    torch.float16: (16, 0x7C00),
    torch.complex32: (16, 0x7C00),
    torch.float32: (32, 0x7F800000),
    torch.complex64: (32, 0x7F800000),
    torch.float64: (64, 0x7FF << 52),
    torch.complex128: (64, 0x7FF << 52),
    torch.float8_e4m3fn: (8, 0x7E),
    torch.float8_e5m2: (8, 0x7C),
}
_ONE_NAN: dict[torch.dtype, int] = {  # the only byte that is NaN
    torch.float8_e8m0fnu: 0xFF,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
}
_SIGNED: dict[int, type[np.integer[Any]]] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_UNSIGNED: dict[int, type[np.integer[Any]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SUMMED = {torch.float64, torch.float32, torch.bfloat16}  # float16 overflows: its sum would prove nothing
_COMPARED_AT_ONCE = 1 << 20  # bytes


def _nan_words(dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    if dtype in _ONE_NAN:
        return (0 if _ONE_NAN[dtype] == 0xFF else 0x7F7F7F7F, 0x7F7F7F7F, 0x01010101, 0, 0x80808080)
    bits, largest = _SIGNED_NAN[dtype]
    magnitude = (1 << bits - 1) - 1
    ones = 0xFFFFFFFF // ((1 << bits) - 1)  # a one in every value of the word
    return (0, ones * magnitude, ones * (magnitude - largest), 0xFFFFFFFF, ones << bits - 1)


# NaN in any of the values, of at most 32 bits, of a 32-bit word, by (flip, magnitude, carry, either, top): with
# x = word ^ flip, the top bit of a value stays in ((x & magnitude) + carry) & (x | either) & top where it is NaN. The
# magnitude plus `carry` reaches the top bit only where it exceeds the largest that is not NaN.
NAN_WORDS = {
    dtype: _nan_words(dtype)
    for dtype in (*_SIGNED_NAN, *_ONE_NAN)
    if dtype in _ONE_NAN or _SIGNED_NAN[dtype][0] <= 32
}
NO_NAN = (0, 0, 0, 0, 0)


class NaNTest(NamedTuple):
    """A row has NaN if the extreme of its bits, read as `dtype`, lies beyond `limit`."""

    dtype: type[np.integer[Any]]
    limit: int
    lowest: bool = False  # the extreme is the minimum

    def found(self, rows: Array) -> Array:
        """bool [n] for uint8 rows [n, k]."""
        values = rows.view(self.dtype)
        if self.lowest:
            return np.asarray(np.minimum.reduce(values, axis=1) < self.limit)
        return np.asarray(np.maximum.reduce(values, axis=1) > self.limit)


def nan_tests(dtype: torch.dtype) -> list[NaNTest]:
    """Tests of which any passes exactly when a row has NaN; none for dtypes without NaN."""
    if dtype in _SIGNED_NAN:
        bits, largest = _SIGNED_NAN[dtype]
        # The signed maximum finds NaNs without the sign bit, the unsigned one those with it.
        return [NaNTest(_SIGNED[bits], largest), NaNTest(_UNSIGNED[bits], largest | 1 << (bits - 1))]
    if dtype in _ONE_NAN:
        top = _ONE_NAN[dtype] == 0xFF
        return [NaNTest(np.uint8, 0xFE) if top else NaNTest(np.int8, -127, lowest=True)]
    return []


def nan_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [n] for uint8 rows [n, k] on the CPU, contiguous, k a multiple of the size of `dtype`."""
    found, array = np.zeros(len(rows), np.bool_), rows.numpy()
    for test in nan_tests(dtype):
        if test.found(array.reshape(1, -1))[0]:  # ten times as fast as row by row, and most often enough
            found |= test.found(array)
    return torch.from_numpy(found)


def sum_is_finite(rows: Tensor, dtype: torch.dtype) -> bool:
    """True only if there is no NaN, which any sum keeps; infinities and overflow make it False as well.

    The fastest test of many rows on the CPU, uint8 [n, k], that most rows pass.
    """
    dtype = _REAL.get(dtype, dtype)
    return dtype in _SUMMED and math.isfinite(rows.view(dtype).sum().item())


def constant_rows(rows: Tensor) -> list[int]:
    """For uint8 rows [n, nbytes] on the CPU, nbytes > 0: the byte that a whole row repeats, or -1.

    A few probes settle most rows; only the others are read whole.
    """
    nbytes = rows.shape[1]
    places = [0, nbytes // 5, nbytes // 3, nbytes // 2, nbytes - 1]
    if len(rows) == 1:  # most tensors: a list is faster than arrays
        row = rows[0].numpy().data
        return [row[0] if all(row[place] == row[0] for place in places) and _repeats(rows[0]) else -1]
    probes = rows.numpy()[:, places]
    constant = [-1] * len(rows)
    for i in np.flatnonzero((probes == probes[:, :1]).all(axis=1)).tolist():
        if _repeats(rows[i]):
            constant[i] = int(probes[i, 0])
    return constant


def _repeats(row: Tensor) -> bool:
    """Whether all bytes of uint8 [n], n > 0, are equal."""
    return all(bool((part == row[0]).all()) for part in torch.split(row, _COMPARED_AT_ONCE))
