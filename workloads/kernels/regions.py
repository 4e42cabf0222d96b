"""Boxes of strided tensors on a GPU, filled or copied by one kernel launch for each width of memory access.

A load may pad a hundred thousand boxes, and a launch for each takes a thousand times as long as the bytes do. A box is
written in units of up to 8 bytes, as wide as its addresses, strides and contiguous runs allow.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_DIMS = 8
_WIDEST = 8  # bytes of a unit
_BLOCK = 1024  # units that one program writes
_MOST_UNITS = 1 << 30  # of a box, whose units the kernel counts in 32 bits

# Columns of a table.
_ADDRESSES = slice(0, 2)  # the second is what is filled in, or the source's address
_SIZES = slice(2, 10)
_STRIDES = slice(10, 18)  # in bytes
_SOURCE_STRIDES = slice(18, 26)
_ITEM = 26  # bytes of an element
_COLUMNS = 32


class Writes(NamedTuple):
    """One launch. table: int64 [boxes, 32], tiles: int64 [tiles, 2], as the kernel wants them, on the device."""

    table: Tensor
    tiles: Tensor
    unit: int
    dims: int
    copy: bool

    def run(self) -> None:
        """Queues it."""
        try:
            import triton.language as tl

            from workloads.kernels.regions_kernel import regions_kernel
        except ImportError as error:
            raise RuntimeError(
                f"Memory on {self.table.device} is filled and copied by a Triton kernel, but {error}: install the "
                "triton that belongs to this torch."
            ) from error
        unit = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[self.unit]
        with torch.cuda.device(self.table.device) if self.table.is_cuda else nullcontext():
            regions_kernel[(len(self.tiles),)](
                self.table, self.tiles, UNIT=unit, DIMS=self.dims, COPY=self.copy, BLOCK=_BLOCK
            )


class Regions:
    """Gathers boxes on one device, for `plan`. Their tensors must stay where they are until the last launch has run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fills: list[Array] = []
        self._copies: list[Array] = []
        self._bits: dict[tuple[torch.dtype, float], int] = {}

    def fill(
        self, tensor: Tensor, boxes: Sequence[Sequence[tuple[int, int]]], values: Sequence[float]
    ) -> None:
        """tensor[box] = value for every box, (start, length) for each dimension; `value` as `fill_` takes it.

        Raises ValueError for a tensor of more than eight dimensions, and for boxes that leave it.
        """
        shape, strides = np.array(tensor.shape, np.int64), np.array(tensor.stride(), np.int64)
        spans = np.array(boxes, np.int64).reshape(len(boxes), -1, 2)
        start, length = spans[..., 0], spans[..., 1]
        if tensor.ndim > _DIMS or tensor.element_size() > _WIDEST or spans.shape[1] != tensor.ndim:
            raise ValueError(
                f"Cannot fill boxes of {spans.shape[1]} dimensions in a {tensor.dtype} tensor of shape "
                f"{tuple(tensor.shape)}: both need equally many, at most {_DIMS}, and values at most {_WIDEST} bytes."
            )
        outside = ((start < 0) | (length < 0) | (start + length > shape)).any(1)
        if outside.any():
            raise ValueError(
                f"Box {boxes[int(outside.argmax())]} leaves a tensor of shape {tuple(tensor.shape)}."
            )
        bits = np.array([self._bits_of(tensor.dtype, value) for value in values], np.int64)
        item = tensor.element_size()
        address = tensor.data_ptr() + start @ strides * item
        self._fills.append(_table(address, bits, length, strides * item, 0 * strides, item))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target.copy_(source) of bytes. Raises ValueError unless shape, dtype and device are equal, and when more than
        eight dimensions are left once neighbours are merged. They must not overlap."""
        if (target.shape, target.dtype, target.device) != (source.shape, source.dtype, source.device):
            raise ValueError(
                f"Cannot copy the bytes of {source.dtype} {tuple(source.shape)} on {source.device} to {target.dtype} "
                f"{tuple(target.shape)} on {target.device}: shape, dtype and device must be equal."
            )
        size, to, by = _merged(target.shape, target.stride(), source.stride())
        if len(size) > _DIMS or target.element_size() > _WIDEST:
            raise ValueError(
                f"Cannot copy {tuple(target.shape)} with strides {source.stride()} to strides {target.stride()}: "
                f"that takes {len(size)} loops over {target.dtype}; the kernel has {_DIMS}, over at most {_WIDEST} B."
            )
        item, places = target.element_size(), (target.data_ptr(), source.data_ptr())
        address, source_address = (np.array([place]) for place in places)
        self._copies.append(_table(address, source_address, size[None], to * item, by * item, item))

    def plan(self) -> list[Writes]:
        """The launches for all boxes so far, at most one for each width that fills or copies. They write what was
        gathered each time they run."""
        launches = []
        for tables, copy in ((self._fills, False), (self._copies, True)):
            if tables:
                table = np.concatenate(tables)
                table = _split(_widened(table[(table[:, _SIZES] > 0).all(1)], copy))
                launches += [
                    self._writes(table[table[:, _ITEM] == unit], unit, copy)
                    for unit in np.unique(table[:, _ITEM]).tolist()
                ]
        return launches

    def _writes(self, table: Array, unit: int, copy: bool) -> Writes:
        count = -(-table[:, _SIZES].prod(1) // _BLOCK)
        box = np.repeat(np.arange(len(table)), count)
        first = (np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)) * _BLOCK
        tiles = np.stack([box, first], axis=1)
        dims = _DIMS - int((table[:, _SIZES] > 1).any(0).argmax())
        return Writes(self._uploaded(table), self._uploaded(tiles), unit, dims, copy)

    def _uploaded(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        return (
            tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
        )

    def _bits_of(self, dtype: torch.dtype, value: float) -> int:
        """8 bytes of `value` repeated."""
        key = (dtype, value)
        if key not in self._bits:
            octets = torch.empty(1, dtype=dtype).fill_(value).view(torch.uint8)
            self._bits[key] = int(octets.repeat(_WIDEST // len(octets)).view(torch.int64))
        return self._bits[key]


def write(launches: Sequence[Writes]) -> None:
    for launch in launches:
        launch.run()


def _table(
    address: Array, source: Array, size: Array, strides: Array, source_strides: Array, item: int
) -> Array:
    """int64 [n, _COLUMNS] of boxes [n] with sizes [n, dims] and strides [dims] in bytes."""
    table = np.zeros((len(address), _COLUMNS), np.int64)
    table[:, _SIZES] = 1
    dims = size.shape[1]
    table[:, _ADDRESSES] = np.stack([address, source], axis=1)
    for columns, values in ((_SIZES, size), (_STRIDES, strides), (_SOURCE_STRIDES, source_strides)):
        table[:, columns.stop - dims : columns.stop] = values
    table[:, _ITEM] = item
    return table


def _widened(table: Array, copy: bool) -> Array:
    """The same boxes in the widest units; _ITEM is a unit's bytes then."""
    table = table.copy()
    item, inner = table[:, _ITEM], table[:, _SIZES.stop - 1]
    common, contiguous = inner * item, np.ones(len(table), np.bool_)
    sides = ((0, _STRIDES), (1, _SOURCE_STRIDES))[: 1 + copy]
    for address, strides in sides:
        side = np.where(table[:, _SIZES] == 1, 0, table[:, strides])  # of one element, a stride says nothing
        contiguous &= (side[:, -1] == item) | (inner == 1)
        common = np.gcd.reduce([common, table[:, address], *side[:, :-1].T])
    unit = np.where(contiguous, np.gcd(common, _WIDEST), item)
    for _, strides in sides:
        table[:, strides.stop - 1] = np.where(contiguous, unit, table[:, strides.stop - 1])
    table[:, _SIZES.stop - 1] = inner * item // unit
    table[:, _ITEM] = unit
    return table


def _split(table: Array) -> Array:
    """The same boxes, none of more than _MOST_UNITS."""
    while (large := table[:, _SIZES].prod(1) > _MOST_UNITS).any():
        first = table[large].copy()
        rows, dim = np.arange(len(first)), (first[:, _SIZES] > 1).argmax(1)
        second, half = first.copy(), first[rows, 2 + dim] // 2
        first[rows, 2 + dim] = half
        second[rows, 2 + dim] -= half
        second[rows, 0] += half * second[rows, _STRIDES.start + dim]
        second[rows, 1] += half * second[rows, _SOURCE_STRIDES.start + dim]  # zero where a value is filled in
        table = np.concatenate([table[~large], first, second])
    return table


def _merged(shape: Sequence[int], *strides: Sequence[int]) -> tuple[Array, ...]:
    """Sizes and strides with every dimension merged into the one before it that all strides allow."""
    dims: list[list[int]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if dims and all(before == step * size for before, step in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = [dims[-1][0] * size, *steps]
        else:
            dims.append([size, *steps])
    return tuple(np.array(dims or [[1] * (1 + len(strides))], np.int64).T)
