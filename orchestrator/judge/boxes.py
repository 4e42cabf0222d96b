"""Counts the elements of a tensor that some boxes hold together, exactly, overlaps once."""

import itertools
from collections.abc import Sequence

Box = Sequence[Sequence[int]]  # per dimension [start, length], in elements


def is_whole(box: Box, shape: Sequence[int]) -> bool:
    """Whether one box holds a whole tensor of `shape`; the box of a scalar is empty, and holds it."""
    return len(box) == len(shape) and all(
        start <= 0 and start + length >= size for (start, length), size in zip(box, shape, strict=True)
    )


def union_volume(boxes: Sequence[Box], shape: Sequence[int]) -> int:
    """Elements of a tensor of `shape` in any of `boxes`; what lies outside of the tensor counts nothing.

    Boxes of another number of dimensions than the tensor hold nothing of it.
    """
    fitting = {
        tuple(
            (max(0, start), min(size, start + length))
            for (start, length), size in zip(box, shape, strict=True)
        )
        for box in boxes
        if len(box) == len(shape)
    }
    return _volume([box for box in fitting if all(low < high for low, high in box)])


def _volume(boxes: Sequence[tuple[tuple[int, int], ...]]) -> int:
    """Of boxes of (low, high) per dimension: the first dimension is cut wherever a box begins or ends."""
    if not boxes or not boxes[0]:
        return len(boxes[:1])
    if len(boxes) == 1:
        volume = 1
        for low, high in boxes[0]:
            volume *= high - low
        return volume
    cuts = sorted({edge for box in boxes for edge in box[0]})
    total = 0
    for low, high in itertools.pairwise(cuts):
        inside = {box[1:] for box in boxes if box[0][0] <= low and box[0][1] >= high}
        total += (high - low) * _volume(list(inside))
    return total
