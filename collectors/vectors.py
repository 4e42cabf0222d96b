"""Finds checkpoint vectors (norms, biases, scalars), whole or in pieces, within the live vectors of one rank."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from collectors.names import likeness
from collectors.row_index import as_dtype, can_be_read

_LONGEST = 4 << 20  # bytes of a live vector that is searched for others within it
_MOST_PLACES = 64  # of one vector within another

Match = tuple[str, int, int, int, int]  # name, start in it, length, number of the live tensor, start there
Live = Sequence[tuple[int, str, Tensor]]  # number, path, tensor
Beside = Mapping[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Vector:
    number: int
    path: str
    dtype: torch.dtype
    data: bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    start: int
    length: int
    data: bytes  # as the live dtype has it


class VectorSearch:
    def __init__(self, live: Live, tp: int) -> None:
        self._live: defaultdict[torch.dtype, list[_Vector]] = defaultdict(list)
        self._whole: defaultdict[tuple[torch.dtype, bytes], list[_Vector]] = defaultdict(list)
        for number, path, tensor in live:
            vector = _Vector(number, path, tensor.dtype, _octets(tensor, tensor.dtype))
            self._whole[tensor.dtype, vector.data].append(vector)
            if len(vector.data) <= _LONGEST:
                self._live[tensor.dtype].append(vector)
        self._pieces = [count for count in range(1, tp + 1) if tp % count == 0]
        self._claimed: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def find(self, values: Mapping[str, Tensor], beside: Beside) -> Iterator[Match]:
        """values: checkpoint name -> vector. beside: where matrices of the same modules were found: where first rows
        of a merged weight lie, values of its merged bias do too."""
        left = dict(values)
        for pieces in self._pieces:
            for dtype in list(self._live):
                found = set()
                cut = [p for name, tensor in left.items() for p in _cut(name, tensor, dtype, pieces)]
                times = Counter(piece.data for piece in cut)
                for piece in cut:
                    for vector, offset in self._places(piece, dtype, times[piece.data], beside):
                        size = dtype.itemsize
                        self._claimed[vector.number].append((offset, offset + piece.length * size))
                        found.add(piece.name)
                        yield piece.name, piece.start, piece.length, vector.number, offset // size
                for name in found:
                    del left[name]

    def _places(
        self, piece: _Piece, dtype: torch.dtype, times: int, beside: Beside
    ) -> list[tuple[_Vector, int]]:
        places = [(vector, 0) for vector in self._whole.get((dtype, piece.data), ())]
        places += [
            (vector, offset)
            for vector in self._live[dtype]
            if len(vector.data) > len(piece.data)
            for offset in _within(vector.data, piece.data, dtype.itemsize)
        ]
        if len(places) < 2 or (times == 1 and not _is_constant(piece.data, dtype.itemsize)):
            return places
        return [max(places, key=lambda place: self._rank(piece, place[0], place[1], beside, dtype.itemsize))]

    def _rank(
        self, piece: _Piece, vector: _Vector, offset: int, beside: Beside, size: int
    ) -> tuple[object, ...]:
        there = beside.get((_module(piece.name), _module(vector.path)))
        expected = there is not None and there[1] - there[0] == offset // size - piece.start
        end = offset + len(piece.data)
        free = all(end <= start or stop <= offset for start, stop in self._claimed[vector.number])
        return expected, likeness(piece.name, vector.path), free, -offset


class RowRun(NamedTuple):
    """Rows of a checkpoint's matrix that were found in a live one, and the heights of both."""

    source: str
    height: int
    start: int
    length: int
    tensor: str
    live_height: int
    there: int


def find_along_rows(values: Mapping[str, Tensor], live: Live, runs: Sequence[RowRun]) -> Iterator[Match]:
    """Vectors that are cut as the rows of a matrix of their module: a bias of several sections, each of which is split
    over ranks by itself. values: checkpoint name -> vector."""
    by_module: defaultdict[str, list[RowRun]] = defaultdict(list)
    for run in runs:
        by_module[_module(run.source)].append(run)
    beside: defaultdict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for number, path, tensor in live:
        beside[_module(path)].append((number, tensor.reshape(-1)))
    for name, vector in values.items():
        for run in by_module[_module(name)]:
            piece = vector.reshape(-1)[run.start : run.start + run.length]
            for number, tensor in beside[_module(run.tensor)]:
                there = tensor[run.there : run.there + run.length]
                fits = (vector.numel(), len(tensor)) == (run.height, run.live_height)
                if fits and _same(piece, there):
                    yield name, run.start, run.length, number, run.there


def _module(path: str) -> str:
    return path.rpartition(".")[0]


def _same(piece: Tensor, live: Tensor) -> bool:
    return can_be_read(piece.dtype, live.dtype) and _octets(piece, live.dtype) == _octets(live, live.dtype)


def _cut(name: str, tensor: Tensor, dtype: torch.dtype, pieces: int) -> Iterator[_Piece]:
    count = tensor.numel()
    if count == 0 or count % pieces or not can_be_read(tensor.dtype, dtype):
        return
    data, length = _octets(tensor, dtype), count // pieces
    for start in range(0, count, length):
        yield _Piece(name, start, length, data[start * dtype.itemsize : (start + length) * dtype.itemsize])


def _octets(tensor: Tensor, dtype: torch.dtype) -> bytes:
    value = as_dtype(tensor.detach().reshape(-1).contiguous(), dtype).cpu()
    return bytes(value.view(torch.uint8).numpy())


def _is_constant(data: bytes, size: int) -> bool:
    return data == data[:size] * (len(data) // size)


def _within(data: bytes, piece: bytes, size: int) -> list[int]:
    """Offsets of `piece`, multiples of an element, or for a constant of the largest length that divides both."""
    step = math.gcd(len(data), len(piece)) if _is_constant(piece, size) else size
    if len(piece) == size and len(data) > 64 * size:
        return []  # one number in a long vector is chance
    offsets: list[int] = []
    at = data.find(piece)
    while at >= 0 and len(offsets) < _MOST_PLACES:
        if at % step == 0:
            offsets.append(at)
            at += step
        else:
            at += 1
        at = data.find(piece, at)
    return offsets
