"""Layouts in which kernels take block scales. Both permute bytes and compute nothing, so both have an inverse."""

import torch
from torch import Tensor

TMA_FLOATS = 4  # TMA wants the stride between columns to be a multiple of 16 bytes
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4  # tile of scales that one tcgen05 instruction reads
_LANES = 32


def to_mn_major(scales: Tensor) -> Tensor:
    """float32 [..., MN, K] -> the same values with strides (..., 1, MN rounded up to 4), as DeepGEMM's FP8 GEMMs
    read them."""
    mn, k = scales.shape[-2:]
    columns = scales.new_zeros(*scales.shape[:-2], k, _round_up(mn, TMA_FLOATS))
    out = columns.transpose(-1, -2)[..., :mn, :]
    return out.copy_(scales)


def is_mn_major(scales: Tensor) -> bool:
    """Whether scales lie as `to_mn_major` leaves them; what a checkpoint holds never does."""
    return scales.stride()[-2:] == (1, _round_up(scales.shape[-2], TMA_FLOATS))


def swizzle(scales: Tensor) -> Tensor:
    """float8_e4m3fn [..., N, C] -> [..., N rounded up to 128, C rounded up to 4], filled up with zeros.

    Scales of NVFP4 in cuBLAS's order for block-scaled GEMMs: tiles of 128 x 4 one after another along a row of tiles;
    within a tile, scale (r, c) lies at 16 * (r mod 32) + 4 * (r div 32) + c.
    """
    rows, columns = scales.shape[-2:]
    padded = torch.zeros(
        *scales.shape[:-2],
        _round_up(rows, SWIZZLE_ROWS),
        _round_up(columns, SWIZZLE_COLUMNS),
        dtype=torch.uint8,
        device=scales.device,
    )
    padded[..., :rows, :columns] = scales.view(torch.uint8)
    split = (-1, SWIZZLE_ROWS // _LANES, _LANES, padded.shape[-1] // SWIZZLE_COLUMNS, SWIZZLE_COLUMNS)
    tiles = padded.reshape(*scales.shape[:-2], *split)  # [..., tile row, r div 32, r mod 32, tile column, c]
    return _swapped(tiles).reshape(padded.shape).view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle`: contiguous [..., rows, columns]."""
    tile_columns = swizzled.shape[-1] // SWIZZLE_COLUMNS
    split = (-1, tile_columns, _LANES, SWIZZLE_ROWS // _LANES, SWIZZLE_COLUMNS)
    tiles = swizzled.view(torch.uint8).reshape(*swizzled.shape[:-2], *split)
    plain = _swapped(tiles).reshape(swizzled.shape)[..., :rows, :columns]
    return plain.contiguous().view(swizzled.dtype)


def _swapped(tiles: Tensor) -> Tensor:
    """[..., tile row, a, 32, b, 4] -> [..., tile row, b, 32, a, 4]."""
    return tiles.transpose(-4, -2)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
