"""Block formats in which checkpoints store quantised matrices, by the name that a tensor table gives them."""

from collections.abc import Callable

import torch

from workloads.kernels.fp8_blocks import quantize_fp8_blocks
from workloads.kernels.quantization import (
    BLOCK,
    quantize_fp8_rows,
    quantize_fp8_tiles,
    quantize_mxfp4,
    quantize_nvfp4,
)

Pieces = dict[str, torch.Tensor]  # by the piece's name in the table


INPUT_RANGE = 2.0  # of an input, as if calibration had seen it, over that of its matrix at equal spread


def _fp8_block128(matrix: torch.Tensor) -> Pieces:
    """weight E4M3 [..., rows, columns]; scale BF16 [..., rows/128, columns/128], as Qwen publishes it."""
    q, scales = quantize_fp8_tiles(matrix, scale_dtype=torch.bfloat16)
    return {"weight": q, "scale": scales}


def _nvfp4(matrix: torch.Tensor) -> Pieces:
    """Of one matrix: weight uint8 [rows, columns/2], low nibble first; scale E4M3 [rows, columns/16]; scale_2 FP32 [],
    which multiplies it; input_scale FP32 [], the like of its input, different for each matrix."""
    packed, scales, global_scale = quantize_nvfp4(matrix)
    input_scale = global_scale * (INPUT_RANGE * matrix.shape[-1] ** 0.5)  # the spread is 1/sqrt(columns)
    return {"weight": packed, "scale": scales, "scale_2": global_scale, "input_scale": input_scale}


def _mxfp4(matrix: torch.Tensor) -> Pieces:
    """weight uint8 [..., rows, columns/2], low nibble first; scale uint8 [..., rows, columns/32], E8M0."""
    packed, scales = quantize_mxfp4(matrix)
    return {"weight": packed, "scale": scales}


def _mxfp4_blocks(matrix: torch.Tensor) -> Pieces:
    """As `mxfp4`, with the weight as gpt-oss stores it: uint8 [..., rows, columns/32, 16]."""
    pieces = _mxfp4(matrix)
    return {**pieces, "weight": torch.unflatten(pieces["weight"], -1, (-1, BLOCK // 2))}


def _mxfp4_i8(matrix: torch.Tensor) -> Pieces:
    """As `mxfp4`, with the dtypes that DeepSeek stores: int8 and float8_e8m0fnu."""
    packed, scales = quantize_mxfp4(matrix)
    return {"weight": packed.view(torch.int8), "scale": scales.view(torch.float8_e8m0fnu)}


def _fp8_e8m0_block128(matrix: torch.Tensor) -> Pieces:
    """weight E4M3 [..., rows, columns]; scale E8M0 [..., ceil(rows/128), ceil(columns/128)], as DeepSeek-V4 has it."""
    q, scales = quantize_fp8_blocks(matrix)
    return {"weight": q, "scale": scales.view(torch.float8_e8m0fnu)}


def _fp8_e8m0_block32(matrix: torch.Tensor) -> Pieces:
    """The same in blocks of 32 x 32, as DeepSeek-V4.1 has it."""
    q, scales = quantize_fp8_blocks(matrix, BLOCK)
    return {"weight": q, "scale": scales.view(torch.float8_e8m0fnu)}


def _fp8_e8m0_rows32(matrix: torch.Tensor) -> Pieces:
    """weight E4M3 [..., rows, columns]; scale E8M0 [..., rows, columns/32]: rows that are looked up one by one."""
    q, scales = quantize_fp8_rows(matrix, BLOCK)
    return {"weight": q, "scale": scales.view(torch.float8_e8m0fnu)}


# Each takes float32 [..., rows, columns].
FORMATS: dict[str, Callable[[torch.Tensor], Pieces]] = {
    "fp8_block128": _fp8_block128,
    "fp8_e8m0_block128": _fp8_e8m0_block128,
    "fp8_e8m0_block32": _fp8_e8m0_block32,
    "fp8_e8m0_rows32": _fp8_e8m0_rows32,
    "mxfp4_i8": _mxfp4_i8,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "mxfp4_blocks": _mxfp4_blocks,
}
