"""The layout in which the Hopper kernel (`mega_moe_sm90.cu`) streams MXFP4 experts. It permutes bits, and inverts.

A matrix [M, K] is cut into tiles of 128 rows x 128 columns, stored one after another along K, then along M. A tile is
what 256 threads read: two warpgroups of 64 rows each, two runs of 64 columns, 128 threads, 16 bytes a thread. Row g
and row g + 8 of a warp's 16 rows meet in one thread:

- of the first matrix they are gate and up of one channel;
- of the second, neighbouring output features.

Columns: an instruction takes 32, of which a thread has two runs of four, in places 4c.. and 16 + 4c... Which columns
stand there is free, as long as tokens agree. In 64 columns the runs of four, numbered u = 4c + v, stand in place
4v + c: a thread then has 16 neighbours of one group, which share its scale.

A 32-bit word holds eight values of a row, of its two runs ("low", "high"). The magnitude bits of low i are bits
4i..4i+2, those of high i bits 16 + 4i..16 + 4i + 2: byte selectors of a lookup. The sign of low i is bit 8i + 7, where
the byte has it, that of high i bit 8i + 3.

Scales: uint8, for each row and 32 columns how far the exponent lies below the row's largest one, modulo 256. The rows'
largest exponents follow after the scales of a tile of rows, one byte each. Groups of nothing but zeros do not count.
E5M2 holds 26 octaves: an exponent further below is taken as 26 below (`out_of_range` counts such groups), which changes
weights of less than 2^-26 of the row's largest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workloads.kernels.mega_moe_hopper_sizes import FOLDS, SCALE_BYTES, TILE, WEIGHT_BYTES, scale_bytes

GROUP = 32
SMALLEST_LARGEST = 27  # the row's scale, 2^(largest - 140), must be a normal float32

_ROWS = (2, 4, 8)  # warpgroups, warps, g
_COLUMNS = (2, 4, 2, 2, 4)  # of 128: half, c, 32 columns of the half, low or high, i


class Packed(NamedTuple):
    """uint8 [E, M/128, K/128, 8192] and uint8 [E, M/128, 512 * K/128 + 128], and groups out of range, int64 [E]."""

    weight: Tensor
    scale: Tensor
    out_of_range: Tensor


def pack(codes: Tensor, scale: Tensor, gated: bool, into: tuple[Tensor, Tensor] | None = None) -> Packed:
    """Loaded uint8 [E, M, K/2] and uint8 [E, M, K/32] -> the kernel's layout, `into` or new tensors; M, K multiples of
    128. One expert's matrix at a time takes memory beside it.

    gated: the first matrix, whose loaded rows are all gates above all ups.
    """
    experts, rows, columns = codes.shape[0], codes.shape[1] // TILE, 2 * codes.shape[2]
    if into is None:
        weight = codes.new_empty((experts, rows, columns // TILE, WEIGHT_BYTES))
        into = weight, codes.new_empty((experts, rows, scale_bytes(columns)))
    counts = []
    for e in range(experts):
        one_weight, one_scale, out_of_range = _pack_one(codes[e], scale[e], gated)
        into[0][e].copy_(one_weight)
        into[1][e].copy_(one_scale)
        counts.append(out_of_range)
    return Packed(*into, torch.stack(counts))


def unpack(weight: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`: new tensors uint8 [E, M, K/2] and uint8 [E, M, K/32]."""
    restored = [_unpack_one(w, s, gated) for w, s in zip(weight, scale, strict=True)]
    codes, scales = zip(*restored, strict=True)
    return torch.stack(codes), torch.stack(scales)


def folded_exponents(codes: Tensor, scale: Tensor) -> Tensor:
    """The exponents that the kernel computes with: uint8 [..., M, K/32], at least the row's largest less 26."""
    largest = _largest(_values(codes), scale).unsqueeze(-1)
    return torch.maximum(scale.to(torch.int16), largest - FOLDS).clamp_(max=254).to(torch.uint8)


def _pack_one(codes: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    values = _values(codes)
    largest = _largest(values, scale)
    below = largest.unsqueeze(-1) - scale.to(torch.int16)
    busy = _busy(values)
    out_of_range = (busy & (below > FOLDS)).sum()
    rows, columns = values.shape
    tiles = torch.unflatten(
        _physical(values, gated), -1, (-1, *_COLUMNS)
    )  # [mt, wg, warp, hr, g, kb, half, c, s, part, i]
    words = _words(tiles).permute(0, 5, 1, 6, 2, 4, 7, 8, 3)  # [mt, kb, wg, half, warp, g, c, s, hr]
    weight = words.contiguous().view(torch.uint8).view(rows // TILE, columns // TILE, WEIGHT_BYTES)
    groups = torch.unflatten(
        _physical(below.to(torch.uint8), gated), -1, (-1, 2, 2)
    )  # [mt, wg, warp, hr, g, kb, half, c / 2]
    exponents = groups.permute(0, 5, 1, 2, 4, 7, 6, 3)
    tops = _physical(largest.to(torch.uint8).unsqueeze(-1), gated).reshape(rows // TILE, TILE)
    return weight, torch.cat([exponents.reshape(rows // TILE, -1), tops], dim=1), out_of_range


def _unpack_one(weight: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    tiles, steps = weight.shape[:2]
    words = weight.contiguous().view(torch.int32).view(tiles, steps, 2, 2, 4, 8, 4, 2, 2)
    ordered = words.permute(0, 2, 4, 8, 5, 1, 3, 6, 7)  # [mt, wg, warp, hr, g, kb, half, c, s]
    magnitude, sign = _shifts(weight.device)
    word = ordered.unsqueeze(-1).unsqueeze(-1)
    values = ((word >> magnitude) & 7) | (((word >> sign) & 1) << 3)
    loaded = _loaded(values.flatten(5).to(torch.uint8), gated)
    exponents = torch.unflatten(scale[:, : steps * SCALE_BYTES], 1, (steps, 2, 4, 8, 2, 2, 2))
    below = _loaded(exponents.permute(0, 2, 3, 7, 4, 1, 6, 5).flatten(5), gated)
    tops = _loaded(torch.unflatten(scale[:, steps * SCALE_BYTES :], 1, (2, 4, 2, 8, 1)), gated)
    return loaded[:, 0::2] | (loaded[:, 1::2] << 4), tops - below  # modulo 256


def _physical(loaded: Tensor, gated: bool) -> Tensor:
    """[M, n] -> view [mt, wg, warp, hr, g, n] of the rows in the order in which warps hold them."""
    if gated:
        return torch.unflatten(loaded, 0, (2, -1, *_ROWS)).permute(1, 2, 3, 0, 4, 5)
    return torch.unflatten(loaded, 0, (-1, *_ROWS, 2)).permute(0, 1, 2, 4, 3, 5)


def _loaded(physical: Tensor, gated: bool) -> Tensor:
    """The inverse of `_physical`, contiguous [M, n]."""
    order = (3, 0, 1, 2, 4, 5) if gated else (0, 1, 2, 4, 3, 5)
    return physical.permute(order).flatten(0, 4)


def _values(codes: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 [..., K] of E2M1 codes; the low nibble is the even column."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def _busy(values: Tensor) -> Tensor:
    """bool [..., M, K/32]: groups that hold something else than zeros."""
    return torch.unflatten((values & 7) != 0, -1, (-1, GROUP)).any(-1)


def _largest(values: Tensor, scale: Tensor) -> Tensor:
    """int16 [..., M]: exponent byte that a row's exponents are counted from."""
    counted = torch.where(_busy(values), scale, torch.zeros_like(scale))
    return counted.amax(-1).to(torch.int16).clamp_(min=SMALLEST_LARGEST)


def _shifts(device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 [2, 4] (low or high, i): bit of a word where a value's magnitude begins, and that of its sign."""
    part = torch.arange(2, dtype=torch.int32, device=device).unsqueeze(1)
    i = torch.arange(4, dtype=torch.int32, device=device)
    return 16 * part + 4 * i, 8 * i + 7 - 4 * part


def _words(values: Tensor) -> Tensor:
    """uint8 [..., part, i] -> int32 [...]."""
    magnitude, sign = _shifts(values.device)
    wide = values.to(torch.int32)
    return (((wide & 7) << magnitude) | ((wide >> 3) << sign)).sum((-2, -1), dtype=torch.int32)
