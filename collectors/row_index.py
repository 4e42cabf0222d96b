"""Finds rows of tensors by their bytes: 128-bit hashes of many rows at once, and an index of where they lie.

A row's hash is made of the same exact integer products as the fingerprint (`collectors.row_sums`): 16 sums for each
block of the row, then two sums of those modulo 2^64, with random odd keys. So rows of equal bytes have equal hashes
wherever they lie, and the hashes of two different rows agree with a chance of about 2^-112.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from collectors.byte_flags import Array
from collectors.row_sums import ROW_BYTES, SUMS, keys, splitmix64

_AT_ONCE = 16 << 20  # bytes of rows brought together, cast and hashed
_ROWS_AT_ONCE = 1 << 15  # their sums take eight times the memory of 16 bytes
_SMALLEST = 16  # bytes of a row: the product is wrong for one column
_FIRST, _SECOND = 0x726F7773, 0x6B657973  # seeds


@dataclass(frozen=True, slots=True)
class Hashes:
    """uint64 [n] twice: of n rows, in order."""

    first: Array
    second: Array

    def __getitem__(self, part: "slice | Array") -> "Hashes":
        return Hashes(self.first[part], self.second[part])

    def __len__(self) -> int:
        return len(self.first)


def joined(hashes: Sequence[Hashes]) -> Hashes:
    return Hashes(np.concatenate([h.first for h in hashes]), np.concatenate([h.second for h in hashes]))


def hash_rows(matrix: Tensor, dtype: torch.dtype, pieces: int = 1) -> Hashes:
    """Of every row of [n, k], read as `dtype`, cut into equal pieces: those of a row follow each other.

    The matrix may have any strides and lie on any device; a bounded part of it is copied at a time.
    """
    rows, width = matrix.shape
    step = min(_ROWS_AT_ONCE, max(1, _AT_ONCE // max(1, width * matrix.element_size())))
    made = [_hash(as_dtype(matrix[start : start + step], dtype), pieces) for start in range(0, rows, step)]
    return joined(made) if made else Hashes(np.empty(0, np.uint64), np.empty(0, np.uint64))


def as_dtype(tensor: Tensor, dtype: torch.dtype | Callable[[Tensor], Tensor]) -> Tensor:
    """The values in another float dtype; the bytes where it is bytes that are kept under another name; or what an
    engine makes of them as it loads."""
    if not isinstance(dtype, torch.dtype):
        return dtype(tensor)
    if tensor.dtype == dtype:
        return tensor
    return tensor.view(dtype) if dtype.itemsize == 1 else tensor.to(dtype)


def can_be_read(stored: torch.dtype, live: torch.dtype) -> bool:
    """Whether an engine that keeps `live` may have got it from `stored`: as it is, cast, or as raw bytes."""
    wide = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    if stored == live or (stored in wide and live in wide):
        return True
    return stored.itemsize == live.itemsize == 1 and torch.uint8 in (stored, live)


def _hash(matrix: Tensor, pieces: int) -> Hashes:
    octets = _in_blocks(matrix.contiguous().cpu().view(torch.uint8).view(len(matrix) * pieces, -1))
    width = octets.shape[1]
    count = -(-width // ROW_BYTES)
    block = width // count
    key = keys(0, octets.device)[:block]
    sums = torch._int_mm(octets.view(torch.int8).view(-1, block), key).view(len(octets), count * SUMS)
    values = (
        sums.numpy().astype(np.int64).view(np.uint64)
    )  # exact: modulo 2^64 a negative number is its complement
    return Hashes(*((values * _multipliers(seed, count * SUMS)).sum(1) for seed in (_FIRST, _SECOND)))


def _in_blocks(octets: Tensor) -> Tensor:
    """With zeros behind every row where its length cannot be cut into as few equal blocks as it fills."""
    width = octets.shape[1]
    if width < _SMALLEST:
        return pad(octets, (0, _SMALLEST - width))
    return pad(octets, (0, -width % -(-width // ROW_BYTES)))


def _multipliers(seed: int, count: int) -> Array:
    return splitmix64(seed, count) | np.uint64(1)


class RowIndex:
    """Rows of one width and dtype of many tensors, numbered through in the order in which they were added."""

    def __init__(self) -> None:
        self._hashes: list[Hashes] = []
        self._tensors: list[int] = []  # which tensor
        self._firsts: list[int] = [0]  # number of its first row; one more at the end
        self.hashes = Hashes(np.empty(0, np.uint64), np.empty(0, np.uint64))

    def add(self, tensor: int, hashes: Hashes) -> None:
        self._hashes.append(hashes)
        self._tensors.append(tensor)
        self._firsts.append(self._firsts[-1] + len(hashes))

    def close(self) -> None:
        """After the last `add`."""
        self.hashes = joined(self._hashes)
        self._hashes.clear()
        self._order = np.argsort(self.hashes.first, kind="stable")
        self._sorted = self.hashes.first[self._order]
        self._starts = np.array(self._firsts)

    def tensor(self, row: int) -> tuple[int, int, int]:
        """Which tensor a row is of, and the numbers of its first row and of the row after its last."""
        i = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._tensors[i], self._firsts[i], self._firsts[i + 1]

    def places(self, rows: Array) -> Array:
        """int64 [n]: the position of each row's tensor among those that were added."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def counts(self, hashes: Hashes) -> Array:
        """int64 [n]: how many rows have each hash (its first half)."""
        return np.searchsorted(self._sorted, hashes.first, "right") - np.searchsorted(
            self._sorted, hashes.first
        )

    def pairs(self, hashes: Hashes) -> tuple[Array, Array]:
        """Every (position in `hashes`, row of the index) of equal hashes, ordered by position."""
        low = np.searchsorted(self._sorted, hashes.first)
        counts = np.searchsorted(self._sorted, hashes.first, "right") - low
        positions = np.repeat(np.arange(len(hashes)), counts)
        within = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._order[np.repeat(low, counts) + within]
        equal = self.hashes.second[rows] == hashes.second[positions]
        return positions[equal], rows[equal]

    def candidates(self, first: np.uint64, second: np.uint64) -> Array:
        """Rows of this hash, in order."""
        low, high = np.searchsorted(self._sorted, first), np.searchsorted(self._sorted, first, "right")
        rows = self._order[low:high]
        return np.asarray(rows[self.hashes.second[rows] == second])

    def run(self, hashes: Hashes, row: int) -> int:
        """How many of `hashes`, from the first, are those of `row` and the rows behind it in its tensor."""
        count = min(len(hashes), self.tensor(row)[2] - row)
        there = self.hashes[row : row + count]
        equal = (there.first == hashes.first[:count]) & (there.second == hashes.second[:count])
        return count if equal.all() else int(np.argmin(equal))


def runs(positions: Array, rows: Array, places: Array) -> Iterator[tuple[int, int, int]]:
    """(first position, first row, length) of the maximal runs in which both go up by one within one tensor."""
    if not len(positions):
        return
    order = np.lexsort((positions, rows - positions, places))
    positions, rows, places = positions[order], rows[order], places[order]
    ends = (np.diff(positions) != 1) | (np.diff(rows) != 1) | (np.diff(places) != 0)
    starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
    lengths = np.diff(np.append(starts, len(positions)))
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        yield int(positions[start]), int(rows[start]), length
