"""What raw bytes say beside their digest: whether a row holds NaN, and whether it repeats one byte.

NaN is looked for in the bit patterns: by the extremes of the bits read as integers, which reads memory
once and writes none, and exists for every dtype, unlike isnan.
"""

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
_TORCH_SIGNED = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class NaNTest(NamedTuple):
    """A row has NaN if the extreme of its bits, read as `dtype`, lies beyond `limit`."""

    dtype: type[np.integer[Any]]
    limit: int
    lowest: bool = False  # the extreme is the minimum

    def found(self, values: Array) -> Array:
        """bool [n] for integer values [n, k]."""
        if self.lowest:
            return np.asarray(np.minimum.reduce(values, axis=1) < self.limit)
        return np.asarray(np.maximum.reduce(values, axis=1) > self.limit)


def nan_tests(dtype: torch.dtype | None) -> list[NaNTest]:
    """Tests of which any passes exactly when a row has NaN; none for dtypes without NaN, and for None."""
    if dtype in _SIGNED_NAN:
        bits, largest = _SIGNED_NAN[dtype]
        # The signed maximum finds NaNs without the sign bit, the unsigned one those with it.
        return [NaNTest(_SIGNED[bits], largest), NaNTest(_UNSIGNED[bits], largest | 1 << (bits - 1))]
    if dtype in _ONE_NAN:
        top = _ONE_NAN[dtype] == 0xFF
        return [NaNTest(np.uint8, 0xFE) if top else NaNTest(np.int8, -127, lowest=True)]
    return []


def nan_rows(words: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [n] for int64 words [n, k], by torch's operations on their device."""
    if dtype in _SIGNED_NAN:
        bits, largest = _SIGNED_NAN[dtype]
        magnitude = words.view(_TORCH_SIGNED[bits]) & ((1 << (bits - 1)) - 1)
        return (magnitude > largest).any(1)
    if dtype in _ONE_NAN:
        return (words.view(torch.uint8) == _ONE_NAN[dtype]).any(1)
    return torch.zeros(len(words), dtype=torch.bool, device=words.device)


def constant_rows(rows: Array) -> Array:
    """int16 [n] for uint8 rows [n, nbytes], nbytes > 0: the byte that a whole row repeats, or -1.

    A few probes settle most rows; only the others are read whole.
    """
    n, nbytes = rows.shape
    probes = rows[:, [0, nbytes // 5, nbytes // 3, nbytes // 2, nbytes - 1]]
    constant = np.full(n, -1, np.int16)
    for row in np.flatnonzero((probes == probes[:, :1]).all(axis=1)):
        if (rows[row] == rows[row, 0]).all():
            constant[row] = rows[row, 0]
    return constant
