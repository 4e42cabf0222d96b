"""Triton kernel: fills or copies boxes of strided memory, of which a table says where they lie.

Importing this module needs triton; `workloads.kernels.regions` does so when the first box on a GPU is written.
"""

import triton
import triton.language as tl


@triton.jit
def regions_kernel(
    table,  # int64 [boxes, 32]: address, value or source's address, 8 sizes in units, 8 strides, 8 of the source
    tiles,  # int64 [tiles, 2]: box, first unit
    UNIT: tl.constexpr,  # integer type of what is written at a time; strides are bytes
    DIMS: tl.constexpr,  # how many of the 8 sizes, the last ones, exceed 1
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes BLOCK units of one box, the last of whose dimensions is the innermost."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 2
    box = table + tl.load(tile) * 32
    rest = (tl.load(tile + 1) + tl.arange(0, BLOCK)).to(tl.uint32)
    target = tl.zeros([BLOCK], tl.int64) + tl.load(box)
    source = tl.zeros([BLOCK], tl.int64) + tl.load(box + 1)
    for dim in tl.static_range(9, 9 - DIMS, -1):
        size = tl.load(box + dim).to(tl.uint32)
        place = rest % size
        rest = rest // size
        target += place.to(tl.int64) * tl.load(box + dim + 8)
        if COPY:
            source += place.to(tl.int64) * tl.load(box + dim + 16)
    inside = rest == 0
    pointer = target.to(tl.pointer_type(UNIT))
    value = tl.load(source.to(tl.pointer_type(UNIT)), mask=inside) if COPY else source.to(UNIT)
    tl.store(pointer, value, mask=inside)
