"""Matrix products of quantised weights with activations that are quantised on the way, without the last rounding.

Products are summed in float64. Of FP8 the terms have 56 significant bits and are rounded to 53; of NVFP4 the sum is
exact and only its scaling is rounded. Sharding and batch shape therefore leave a BF16 result alone, as in `linear`.
"""

import torch
from torch import Tensor

from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import linear_partial
from workloads.kernels.quantization import (
    dequantize_fp8_groups,
    dequantize_fp8_tiles,
    dequantize_nvfp4_blocks,
    quantize_fp8_groups,
    quantize_nvfp4_blocks,
)
from workloads.kernels.scale_layout import is_mn_major, unswizzle


def fp8_tiles_linear_partial(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x BF16 [T, K] times weight float8_e4m3fn [N, K] transposed -> float64 [T, N].

    x is quantised per token and 128 columns. scales: float32 [N/128, K/128], MN-major. ValueError when they are not,
    as DeepGEMM's fp8_gemm_nt asserts: it would read a checkpoint's scales as those of other tiles.
    """
    if not is_mn_major(scales):
        raise ValueError(
            f"The block scales {tuple(scales.shape)} have strides {scales.stride()}, as a checkpoint lays them out; "
            "the FP8 kernel reads them MN-major: post-process the weights before the first forward."
        )
    wide = dequantize_fp8_tiles(weight, scales)
    return by_rows(lambda rows: linear_partial(dequantize_fp8_groups(*quantize_fp8_groups(rows)), wide), x)


def nvfp4_linear_partial(
    x: Tensor, packed: Tensor, swizzled: Tensor, alphas: Tensor, input_scale: Tensor
) -> Tensor:
    """x BF16 [T, K] times an NVFP4 weight [N, K] transposed -> float64 [T, N].

    x is quantised per token and 16 columns under input_scale, a float32 scalar. packed: uint8 [N, K/2]. swizzled:
    `swizzle` of its block scales. alphas: float32 [N], product of both global scales for each row of the weight.
    """
    scales = unswizzle(swizzled, packed.shape[0], packed.shape[1] // 8)
    wide = dequantize_nvfp4_blocks(packed, scales)

    def product(rows: Tensor) -> Tensor:
        q = dequantize_nvfp4_blocks(*quantize_nvfp4_blocks(rows, input_scale))
        return linear_partial(q, wide) * alphas.to(torch.float64)

    return by_rows(product, x)
