"""FP8 weights in square blocks with UE8M0 scales, their packed form for DeepGEMM, and the products they are for.

A checkpoint has one scale for `BLOCK` rows and columns; the last block of either may be partial. The kernel reads one
for each row and `BLOCK` columns, four of them packed into an int32 along K (lowest byte first), MN-major. Decoding is
to float64, in which everything here is exact.
"""

import torch
from torch import Tensor

from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import linear_partial
from workloads.kernels.quantization import (
    FP8_AMAX_FLOOR,
    FP8_MAX,
    decode_e8m0,
    dequantize_fp8_rows,
    encode_e8m0_ceil,
    quantize_fp8_rows,
)

BLOCK = 128
PACKED = 4  # scales in an int32
ROW_MULTIPLE = 4  # rows that TMA needs the columns of packed scales to be a multiple of


def quantize_fp8_blocks(w: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise float32 [..., N, K] to (float8_e4m3fn [..., N, K], UE8M0 uint8 [..., ceil(N/block), ceil(K/block)]).

    Per block: s = 2^ceil(log2(max(|w|, 1e-4) / 448)), q = e4m3(w / s).
    """
    rows, columns = w.shape[-2:]
    padded = torch.nn.functional.pad(w.to(torch.float32), (0, -columns % block, 0, -rows % block))
    tiles = torch.unflatten(
        torch.unflatten(padded, -1, (-1, block)), -3, (-1, block)
    )  # [..., n, block, k, block]
    amax = tiles.abs().amax(dim=(-3, -1)).clamp_min_(FP8_AMAX_FLOOR)
    scales = encode_e8m0_ceil(amax / FP8_MAX).clamp_(1, 254).to(torch.uint8)
    divided = w.to(torch.float64) / decode_e8m0(expand_scales(scales, rows, columns, block, 1))
    return divided.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def expand_scales(scales: Tensor, rows: int, columns: int, block: int, group: int) -> Tensor:
    """UE8M0 uint8 [..., ceil(rows/block), ceil(columns/block)] -> [..., rows, ceil(columns/group)]: one for each row
    and `group` columns, of which a block has a whole number."""
    by_row = scales.repeat_interleave(block, -2)[..., :rows, :]
    return by_row.repeat_interleave(block // group, -1)[..., : -(-columns // group)]


def pack_scales(by_row: Tensor) -> Tensor:
    """UE8M0 uint8 [N, C] -> int32 [N, ceil(C/4)] with strides (1, N rounded up to 4); missing bytes are zero."""
    rows, columns = by_row.shape
    words = -(-columns // PACKED)
    packed = by_row.new_zeros(words, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, PACKED)
    filled = torch.nn.functional.pad(by_row, (0, words * PACKED - columns))
    packed[:, :rows] = torch.unflatten(filled, 1, (words, PACKED)).transpose(0, 1)
    return packed.view(torch.int32).squeeze(-1).t()[:rows]


def unpack_scales(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_scales`: uint8 [N, columns]."""
    return packed.t().unsqueeze(-1).view(torch.uint8).transpose(0, 1).flatten(1)[:, :columns]


def is_packed(scales: Tensor) -> bool:
    """Whether scales lie as `pack_scales` leaves them, or are some rows of those."""
    return scales.dtype == torch.int32 and scales.stride(0) == 1


def through_fp8(x: Tensor, group: int) -> Tensor:
    """x [..., K] BF16 or float32 quantised per `group` columns (UE8M0 scale) and decoded: float64 [..., K].

    The last group may be partial.
    """
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -columns % group))
    return dequantize_fp8_rows(*quantize_fp8_rows(padded, group))[..., :columns]


def fp8_linear_partial(x: Tensor, weight: Tensor, packed: Tensor, block: int = BLOCK) -> Tensor:
    """x BF16 [T, K], quantised per token and `block` columns, times weight float8_e4m3fn [N, K] transposed: float64
    [T, N], not rounded. packed: int32 scales of the weight by row, from `pack_scales`.

    ValueError when the scales are still laid out as a checkpoint has them: the kernel would read others' bytes.
    """
    if not is_packed(packed):
        raise ValueError(
            f"The weight's scales are {packed.dtype} {tuple(packed.shape)} with strides {packed.stride()}; the FP8 "
            "kernel takes packed int32, MN-major ones: post-process the weights before the first forward."
        )
    scales = unpack_scales(packed, -(-weight.shape[1] // block))
    wide = weight.to(torch.float64) * decode_e8m0(scales.repeat_interleave(block, -1)[:, : weight.shape[1]])
    return by_rows(lambda rows: linear_partial(through_fp8(rows, block), wide), x)
