"""Tensors of any shape as slabs of rows: what is the same in every layout that an engine may keep a weight in."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from workloads.loading.weights import Region

Box = tuple[int, int, int, int, int, int]  # first slab, slabs, first row, rows, first column, columns


@dataclass(frozen=True, slots=True)
class Grid:
    """A shape without its dimensions of length 1: [slabs, rows, columns].

    Four dimensions and more are [1, first, all others]: such columns are not cut.
    """

    shape: tuple[int, ...]
    slabs: int
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Grid":
        real = [length for length in shape if length != 1]
        if len(real) > 3:
            return cls(shape, 1, real[0], math.prod(real[1:]))
        slabs, rows, columns = [1] * (3 - len(real)) + real
        return cls(shape, slabs, rows, columns)

    @property
    def is_vector(self) -> bool:
        return self.slabs == self.rows == 1

    @property
    def is_cut(self) -> bool:
        """Whether columns are one dimension."""
        return sum(length != 1 for length in self.shape) <= 3

    def region(self, box: Box) -> Region:
        """(start, length) per dimension of the shape."""
        real = sum(length != 1 for length in self.shape)
        spans = [(box[0], box[1]), (box[2], box[3]), (box[4], box[5])]
        spans = spans[3 - real :] if real <= 3 else [spans[1], *([(0, -1)] * (real - 1))]
        left = iter(spans)
        region = []
        for length in self.shape:
            start, count = (0, 1) if length == 1 else next(left)
            region.append((start, length if count < 0 else count))
        return tuple(region)


def matrix(tensor: Tensor, grid: Grid, transposed: bool = False) -> Tensor:
    """All rows of all slabs, [n, k]; with `transposed`, the columns as rows."""
    cube = tensor.reshape(grid.slabs, grid.rows, grid.columns)
    return (cube.transpose(1, 2) if transposed else cube).flatten(0, 1)


def boxes(
    first: int, other: int, length: int, height: int, other_height: int
) -> Iterator[tuple[int, int, int]]:
    """(position, position in the other, length) of a run of rows through two stacks of slabs, cut so that each lies
    within one slab of both, or covers whole slabs of both where they are equally high."""
    end = first + length
    while first < end:
        within = min(height - first % height, other_height - other % other_height, end - first)
        if height == other_height and first % height == other % other_height == 0:
            within = max(within, (end - first) // height * height)
        yield first, other, within
        first, other = first + within, other + within


def span(first: int, length: int, height: int) -> tuple[int, int, int, int]:
    """First slab, slabs, first row and rows of what `boxes` made."""
    if length > height or (length == height and first % height == 0):
        return first // height, length // height, 0, height
    return first // height, 1, first % height, length
