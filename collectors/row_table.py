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
    """At most five: each kind of segment, and those that no aligned copy can read.

    origin: address, aligned, that those of the tables count from. block: rows of a tile.
    """
    count = -(-rows.nbytes // ROW_BYTES)
    segments = np.where(rows.folded, 0, count // _SEGMENT_ROWS)
    for size, counts, first in (
        (GROUP, np.where(rows.folded, -(-count // GROUP), 0), 0 * count),
        (_SEGMENT_ROWS, segments, 0 * count),
        (1, np.where(rows.folded, 0, count - segments * _SEGMENT_ROWS), segments * _SEGMENT_ROWS),
    ):
        leaf, within = spread(counts)
        row = first[leaf] + within * size
        nbytes = np.minimum(rows.nbytes[leaf] - row * ROW_BYTES, size * ROW_BYTES)
        fast = (rows.address[leaf] % ALIGNMENT == 0) & (nbytes % ALIGNMENT == 0)
        for part, align in ((fast, ALIGNMENT), (~fast, 1)):
            if part.any():
                yield _table(rows, leaf[part], row[part], nbytes[part], size, align, origin, block)


def spread(counts: Array) -> tuple[Array, Array]:
    """Int64 twice, for counts [n]: of counts.sum() items in order, which of the n each is of, and its number there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _table(
    rows: Rows,
    leaf: Array,
    row: Array,
    nbytes: Array,
    size: int,
    align: int,
    origin: int,
    block: int,
) -> Table:
    """Segments of `size` rows that start at `row` of leaves number `leaf`, sorted by kind; each kind's are filled up to
    whole tiles with segments of no bytes."""
    address = rows.address[leaf] + row * ROW_BYTES - origin
    sums = rows.sums[leaf] + (row // GROUP * FOLD_BYTES if size == GROUP else row * SUM_BYTES) - origin
    first = rows.first[leaf] - origin
    columns = np.stack([address // align, first, nbytes // align, sums // SUMS_UNIT, rows.leaf[leaf]])
    kind = rows.kind[leaf]
    tile = block // size
    counts = np.bincount(kind)
    tiles = -(-counts // tile)
    shift = np.cumsum(tiles * tile) - tiles * tile - np.cumsum(counts) + counts  # by the fillings before
    padded = np.zeros((len(columns), int(tiles.sum()) * tile), np.int64)
    padded[:, np.arange(len(kind)) + np.repeat(shift, counts)] = columns[:, np.argsort(kind, kind="stable")]
    return Table(size, align, padded, np.repeat(np.arange(len(tiles), dtype=np.int32), tiles))
