"""Finds, by content alone, which slices of a checkpoint the live tensors of one rank hold.

Nothing is known of the engine or its names. Every row of every live tensor is hashed and indexed; then the rows of
each checkpoint tensor are looked up: whole, as one of the equal pieces of a split over ranks, transposed. Rows that
follow each other in both become regions. So merged, stacked, permuted, sharded, padded and cast weights are found.

Equal rows in several places: where the checkpoint has the row once, each place is a copy of it and is reported.
Where the checkpoint repeats it (zeros, tied weights, equal norms), content cannot tell; then it belongs where its
neighbours are, else to the tensor whose name is most alike, so that later checkpoints are held against the right one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from collectors.byte_flags import Array
from collectors.fingerprint import why_unreadable
from collectors.grid import Box, Grid, boxes, matrix, span
from collectors.names import likeness
from collectors.row_index import Hashes, RowIndex, can_be_read, hash_rows, joined, runs
from collectors.vectors import Match, RowRun, VectorSearch, find_along_rows
from workloads.loading.weights import Part, Region, narrow

_MOST_COPIES = 16  # places of one row that are all reported
_MOST_TENSORS = 64  # that are looked at for rows which the checkpoint repeats


class Reader(Protocol):
    """The part of a checkpoint reader that the search needs."""

    def names(self) -> Iterator[str]: ...
    def get(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Located:
    """A region of the live tensor at path `tensor` holds a region of the checkpoint's tensor `source`.

    transposed: the last two dimensions (of those longer than 1) are swapped in the live tensor. dtype: of the live
    tensor; the checkpoint's values are cast to it.
    """

    tensor: str
    target: Region
    source: str
    region: Region
    transposed: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Location:
    """pieces: what was found. reasons: for every checkpoint name that is not held whole, what was not found."""

    pieces: list[Located]
    reasons: dict[str, str]


def locate(live: Sequence[tuple[str, Tensor]], reader: Reader, tp: int) -> Location:
    """live: (path, tensor) of one rank, each path once. tp: ranks that weights are split over.

    Reads the checkpoint up to four times, and only what was not found before. Memory beside the hashes (some 50 bytes
    for each row) is bounded by a few pieces of 16 MiB. Tensors without bytes are left out.
    """
    with torch.no_grad():
        return _Search(live, reader, tp).run()


def to_part(located: Located, live: Tensor) -> Part:
    """The piece in checkpoint layout and live dtype. `live`: the tensor at `located.tensor`."""
    value = narrow(live.detach(), located.target)
    if located.transposed:
        kept = [length for length, size in zip(value.shape, live.shape, strict=True) if size != 1]
        value = value.reshape(kept).transpose(-1, -2)
    return Part(
        tensor=located.tensor,
        name=located.source,
        value=value.reshape([length for _, length in located.region]).contiguous(),
        source=located.source,
        region=located.region,
        read_as=located.dtype,
    )


@dataclass(slots=True)
class _Wanted:
    """A checkpoint tensor. covered: which pieces of its rows were found, [rows, pieces]; tokens of its name."""

    name: str
    grid: Grid
    dtype: torch.dtype
    covered: Array | None = None
    certain: bool = False  # a row that only this tensor has was found

    @property
    def complete(self) -> bool:
        return self.covered is not None and bool(self.covered.all())


@dataclass(slots=True)
class _Query:
    """Rows of one checkpoint tensor in one way of looking at it: every `pieces`-th hash is of the same piece."""

    wanted: _Wanted
    hashes: Hashes
    piece: int
    pieces: int
    transposed: bool
    pairs: list[tuple[Array, Array]] = field(default_factory=list)


class _Search:
    def __init__(self, live: Sequence[tuple[str, Tensor]], reader: Reader, tp: int) -> None:
        self._live = [
            (path, tensor.detach()) for path, tensor in live if not why_unreadable(tensor) and tensor.nbytes
        ]
        self._grids = [Grid.of(tuple(tensor.shape)) for _, tensor in self._live]
        self._reader, self._tp = reader, tp
        self._pieces: dict[Located, None] = {}
        self._used: set[int] = set()  # live tensors of which something was found
        self._wanted = {name: _wanted(name, reader) for name in reader.names()}

    def run(self) -> Location:
        for transposed in (False, True):
            indexes = self._indexes(transposed)
            for pieces in sorted({1, self._tp}):
                self._look(indexes, pieces, transposed)
        self._vectors()
        reasons = {w.name: self._reason(w) for w in self._wanted.values() if not w.complete}
        return Location(list(self._pieces), reasons)

    def _indexes(self, transposed: bool) -> dict[tuple[torch.dtype, int], RowIndex]:
        """Rows of all live tensors; or columns of those of which nothing was found, if anything is looked for."""
        indexes: defaultdict[tuple[torch.dtype, int], RowIndex] = defaultdict(RowIndex)
        complete = all(one.certain or one.grid.is_vector for one in self._wanted.values())
        for i, ((_, tensor), grid) in enumerate(zip(self._live, self._grids, strict=True)):
            if transposed and (complete or i in self._used or grid.is_vector):
                continue
            width = grid.rows if transposed else grid.columns
            indexes[tensor.dtype, width].add(i, hash_rows(matrix(tensor, grid, transposed), tensor.dtype))
        for index in indexes.values():
            index.close()
        return dict(indexes)

    def _look(self, indexes: dict[tuple[torch.dtype, int], RowIndex], pieces: int, transposed: bool) -> None:
        queries: defaultdict[tuple[torch.dtype, int], list[_Query]] = defaultdict(list)
        for wanted in self._wanted.values():
            for key in self._readings(wanted, indexes, pieces):
                rows = matrix(self._reader.get(wanted.name), wanted.grid)
                hashes = hash_rows(rows, key[0], pieces)
                for piece in range(pieces):
                    own = hashes[slice(piece, None, pieces)]
                    queries[key].append(_Query(wanted, own, piece, pieces, transposed))
        for key, some in queries.items():
            self._resolve(indexes[key], key[0], some)

    def _readings(
        self, wanted: _Wanted, indexes: Iterable[tuple[torch.dtype, int]], pieces: int
    ) -> list[tuple[torch.dtype, int]]:
        """Indexes in which rows of the tensor may be; its own dtype before others."""
        grid = wanted.grid
        if wanted.certain or grid.is_vector or grid.columns % pieces or not (grid.is_cut or pieces == 1):
            return []
        width = grid.columns // pieces
        keys = [key for key in indexes if key[1] == width and can_be_read(wanted.dtype, key[0])]
        return sorted(keys, key=lambda key: key[0] != wanted.dtype)

    def _resolve(self, index: RowIndex, dtype: torch.dtype, queries: Sequence[_Query]) -> None:
        """Rows that the checkpoint has once first; they show where their repeated neighbours are."""
        firsts = joined([query.hashes for query in queries]).first
        values, times = np.unique(firsts, return_counts=True)
        claimed = np.zeros(len(index.hashes), np.bool_)
        repeated = []
        for query in queries:
            own = times[np.searchsorted(values, query.hashes.first)]
            places = index.counts(query.hashes)
            once = np.flatnonzero((own == 1) & (places > 0) & (places <= _MOST_COPIES))
            positions, rows = index.pairs(query.hashes[once])
            query.pairs.append((once[positions], rows))
            claimed[rows] = True
            query.wanted.certain |= bool(len(rows))
            repeated.append(np.flatnonzero((places > 0) & ~((own == 1) & (places <= _MOST_COPIES))))
        for query, left in zip(queries, repeated, strict=True):
            if len(left):
                self._assign(index, query, left, claimed)
        for query in queries:
            self._keep(index, dtype, query)

    def _assign(self, index: RowIndex, query: _Query, left: Array, claimed: Array) -> None:
        """Rows that are repeated: beside their neighbours, else where the names are most alike."""
        certain = dict(zip(*(a.tolist() for a in query.pairs[0]), strict=True))
        taken: dict[int, int] = {}
        for ordered, step in ((left.tolist(), 1), (left.tolist()[::-1], -1)):
            for position in ordered:
                beside = certain.get(position - step, taken.get(position - step))
                if position not in taken and beside is not None:
                    row = _beside(index, beside, step, query.hashes, position)
                    if row is not None:
                        taken[position] = row
        claimed[list(taken.values())] = True
        rest = np.array([p for p in left.tolist() if p not in taken], np.int64)
        for start, stop in _stretches(rest):
            position = start
            while position < stop:
                row, length = self._best(index, query, position, stop, claimed)
                taken |= zip(range(position, position + length), range(row, row + length), strict=True)
                claimed[row : row + length] = True
                position += max(1, length)
        query.pairs.append((np.array(list(taken), np.int64), np.array(list(taken.values()), np.int64)))

    def _best(self, index: RowIndex, query: _Query, start: int, stop: int, claimed: Array) -> tuple[int, int]:
        """Row of the index at which the stretch of repeated rows begins, and how far it goes on there."""
        hashes = query.hashes
        rows = index.candidates(hashes.first[start], hashes.second[start])
        if not len(rows):
            return 0, 0
        firsts: dict[
            int, int
        ] = {}  # of each tensor one row: an unclaimed one if there is any, the first of those
        for row in rows[np.argsort(claimed[rows], kind="stable")].tolist():
            firsts.setdefault(index.tensor(row)[0], row)
            if len(firsts) == _MOST_TENSORS:
                break

        def rank(row: int) -> tuple[object, ...]:
            path = self._live[index.tensor(row)[0]][0]
            return (
                likeness(query.wanted.name, path),
                not claimed[row],
                index.run(hashes[slice(start, stop)], row),
            )

        best = max(firsts.values(), key=rank)
        return best, index.run(hashes[slice(start, stop)], best)

    def _keep(self, index: RowIndex, dtype: torch.dtype, query: _Query) -> None:
        positions, rows = (np.concatenate(arrays) for arrays in zip(*query.pairs, strict=True))
        grid, columns = query.wanted.grid, query.wanted.grid.columns // query.pieces
        for position, row, length in runs(positions, rows, index.places(rows)):
            i, first, _ = index.tensor(row)
            holder = self._grids[i]
            height = holder.columns if query.transposed else holder.rows
            for at, there, count in boxes(position, row - first, length, grid.rows, height):
                box = (*span(at, count, grid.rows), query.piece * columns, columns)
                slab, slabs, start, some = span(there, count, height)
                along, across = (start, some), (0, columns)
                if query.transposed:
                    along, across = across, along
                self._add(i, (slab, slabs, *along, *across), query.wanted, box, query.transposed)

    def _add(self, i: int, target: Box, wanted: _Wanted, box: Box, transposed: bool) -> None:
        path, tensor = self._live[i]
        there, region = self._grids[i].region(target), wanted.grid.region(box)
        self._pieces[Located(path, there, wanted.name, region, transposed, tensor.dtype)] = None
        self._used.add(i)
        if wanted.covered is None:
            wanted.covered = np.zeros((wanted.grid.slabs, wanted.grid.rows, self._columns(wanted)), np.bool_)
        unit = wanted.grid.columns // wanted.covered.shape[2]
        slab, slabs, row, rows, column, width = box
        columns = slice(column // unit, -(-(column + width) // unit))
        wanted.covered[slab : slab + slabs, row : row + rows, columns] = True

    def _columns(self, wanted: _Wanted) -> int:
        """Into how many units the columns of `covered` are put together; values of a vector are not."""
        columns = wanted.grid.columns
        if wanted.grid.is_vector:
            return columns
        return self._tp if columns % self._tp == 0 else 1

    def _vectors(self) -> None:
        wanted = [one for one in self._wanted.values() if one.grid.is_vector]
        live = [(i, *self._live[i]) for i, g in enumerate(self._grids) if g.is_vector]
        values = {one.name: self._reader.get(one.name) for one in wanted}
        self._take(VectorSearch(live, self._tp).find(values, self._merged()))
        lost = {one.name: values[one.name] for one in wanted if one.covered is None}
        self._take(find_along_rows(lost, live, self._row_runs()))

    def _take(self, found: Iterable[Match]) -> None:
        for name, start, length, i, offset in found:
            one = self._wanted[name]
            self._add(i, (0, 1, 0, 1, offset, length), one, (0, 1, 0, 1, start, length), False)

    def _row_runs(self) -> list[RowRun]:
        heights = {path: tensor.shape[0] for path, tensor in self._live if tensor.ndim}
        return [
            RowRun(
                one.source,
                self._wanted[one.source].grid.shape[0],
                one.region[0][0],
                one.region[0][1],
                one.tensor,
                heights[one.tensor],
                one.target[0][0],
            )
            for one in self._pieces
            if one.region and one.target and not one.transposed and one.region[0][1] == one.target[0][1]
        ]

    def _merged(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(module of the checkpoint, live module) -> (first row there, first row here) of the matrices found."""
        return {
            (_module(one.source), _module(one.tensor)): (one.region[0][0], one.target[0][0])
            for one in self._pieces
            if one.region and one.target and not one.transposed
        }

    def _reason(self, wanted: _Wanted) -> str:
        grid = wanted.grid
        what = "values" if grid.is_vector else "rows"
        total = grid.columns if grid.is_vector else grid.slabs * grid.rows
        if wanted.covered is None:
            return (
                f"None of its {total} {what} is in a live tensor of this rank, be it whole, as one of {self._tp} "
                "pieces, merged with others, or transposed."
            )
        share = wanted.covered.mean()
        missing = np.flatnonzero(~wanted.covered.reshape(-1, wanted.covered.shape[2]).any(1))
        where = "" if grid.is_vector or not len(missing) else f"; not found are rows {_spans(missing)}"
        return f"{100 * share:.4g} % of it was found in live tensors of this rank{where}."


def _wanted(name: str, reader: Reader) -> _Wanted:
    tensor = reader.get(name)  # mapped: its values are not read
    return _Wanted(name, Grid.of(tuple(tensor.shape)), tensor.dtype)


def _module(path: str) -> str:
    return path.rpartition(".")[0]


def _beside(index: RowIndex, row: int, step: int, hashes: Hashes, position: int) -> int | None:
    """The row next to `row` in its tensor if it is the one looked for."""
    _, first, end = index.tensor(row)
    there = row + step
    if not first <= there < end:
        return None
    same = index.hashes.first[there] == hashes.first[position]
    return there if same and index.hashes.second[there] == hashes.second[position] else None


def _stretches(positions: Array) -> list[tuple[int, int]]:
    """(start, stop) of consecutive numbers."""
    if not len(positions):
        return []
    groups = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [(int(group[0]), int(group[-1]) + 1) for group in groups]


def _spans(rows: Array) -> str:
    """The first few stretches as people write them: 3, 5-9, ..."""
    stretches = _stretches(rows)
    words = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in stretches[:4]]
    return ", ".join(words) + (", ..." if len(stretches) > 4 else "")
