"""Tables of rows for the kernel of `collectors.row_sums_kernel`: where rows lie and where their sums go.

A leaf of more than 64 rows is cut into segments of 64, each of which the kernel folds. Others are cut into segments of
16 rows and into single rows. A tile of the kernel is filled with them whichever tensors they come from, so that small
tensors cost no more than large ones; its values are of one kind of NaN.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from collectors.byte_flags import Array
from collectors.row_sums import FOLD_BYTES, GROUP, GROUP_BYTES, ROW_BYTES, SUM_BYTES

ALIGNMENT = 16  # bytes that one asynchronous copy moves
SUMS_UNIT = 64  # bytes: divides every address of sums
_SEGMENT_ROWS = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """Of n leaves, or of pieces of them that start and end with a segment, int64 [n]: address and bytes, where their
    sums go, their first byte's address, number among the flags, kind of NaN.

    folded: bool [n]: sums take FOLD_BYTES for each group then, and else SUM_BYTES for each row.
    """

    address: Array
    nbytes: Array
    sums: Array
    first: Array
    leaf: Array
    kind: Array
    folded: Array


class Table(NamedTuple):
    """columns: int64 [5, n] as the kernel wants them, n a multiple of a tile's segments; kinds: int32
    [tiles]. rows: of a segment; align: divides every address and every number of bytes."""

    rows: int
    align: int
    columns: Array
    kinds: Array


def is_folded(nbytes: Array) -> Array:
    return nbytes > GROUP_BYTES


def stored_bytes(nbytes: Array) -> Array:
    """Of the sums that the kernel stores for a leaf of nbytes."""
    rows = -(-nbytes // ROW_BYTES)
    return np.where(is_folded(nbytes), -(-rows // GROUP) * FOLD_BYTES, rows * SUM_BYTES)


def tables(rows: Rows, origin: int, block: int) -> Iterator[Table]:
    """At most six: each kind of segment, and those of them that no aligned copy can read.

    origin: address, aligned, that those of the tables count from. block: rows of a tile.
    """
    count = -(-rows.nbytes // ROW_BYTES)
    segments = np.where(rows.folded, 0, count // _SEGMENT_ROWS)
    for size, counts, first in (
        (GROUP, np.where(rows.folded, -(-count // GROUP), 0), 0 * count),
        (_SEGMENT_ROWS, segments, 0 * count),
        (1, np.where(rows.folded, 0, count - segments * _SEGMENT_ROWS), segments * _SEGMENT_ROWS),
    ):
        end = np.minimum(rows.nbytes, (first + counts * size) * ROW_BYTES)
        last = (end % ALIGNMENT != 0).astype(np.int64)  # segments that end between two units
        fast = np.where(rows.address % ALIGNMENT == 0, np.maximum(counts - last, 0), 0)
        for start, number, align in ((first, fast, ALIGNMENT), (first + fast * size, counts - fast, 1)):
            if number.any():
                yield _table(rows, start, number, _Units(size, align, origin, block // size))


def spread(counts: Array) -> tuple[Array, Array]:
    """Int64 twice, for counts [n]: of counts.sum() items in order, which of the n each is of, and its number there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


class _Units(NamedTuple):
    rows: int  # of a segment
    align: int
    origin: int
    tile: int  # segments


def _table(rows: Rows, row: Array, count: Array, units: _Units) -> Table:
    """`count` segments of every leaf, from `row` on, sorted by kind; those of a kind are filled up to whole tiles by
    segments of no bytes."""
    kinds = int(rows.kind.max()) + 1
    totals = np.bincount(rows.kind, weights=count, minlength=kinds).astype(np.int64)
    tiles = -(-totals // units.tile)
    by_kind = np.argsort(
        np.concatenate([rows.kind, np.arange(kinds)]), kind="stable"
    )  # the fillings behind the leaves
    counts = np.concatenate([count, tiles * units.tile - totals])[by_kind]

    def column(leaves: Array, step: int) -> Array:
        """Of every segment its leaf's number, and `step` more for each before it in the leaf."""
        values = np.concatenate([leaves, np.zeros(kinds, np.int64)])[by_kind]
        return np.repeat(values, counts) + within * step if step else np.repeat(values, counts)

    within = spread(counts)[1]
    nbytes = units.rows * ROW_BYTES // units.align
    sums = FOLD_BYTES if units.rows == GROUP else units.rows * SUM_BYTES
    first_sums = rows.sums + (row // GROUP * FOLD_BYTES if units.rows == GROUP else row * SUM_BYTES)
    columns = (
        column((rows.address + row * ROW_BYTES - units.origin) // units.align, nbytes),
        column(rows.first - units.origin, 0),
        np.minimum(column((rows.nbytes - row * ROW_BYTES) // units.align, -nbytes), nbytes),
        column((first_sums - units.origin) // SUMS_UNIT, sums // SUMS_UNIT),
        column(rows.leaf, 0),
    )
    return Table(
        units.rows, units.align, np.stack(columns), np.repeat(np.arange(kinds, dtype=np.int32), tiles)
    )
