"""Matrices in FP8 with one FP32 scale for each output channel, as engines quantise BF16 weights while they load."""

import torch
from torch import Tensor

from workloads.kernels.quantization import FP8_MAX

AMAX_FLOOR = 1e-12  # a row of zeros has a scale all the same


def channel_scales(weight: Tensor) -> Tensor:
    """[N, K] BF16 or FP32 -> FP32 [N]: s = max(amax of the row, 1e-12) / 448, rounded once."""
    return weight.to(torch.float32).abs().amax(dim=1).clamp_min_(AMAX_FLOOR) / FP8_MAX


def channel_codes(weight: Tensor) -> Tensor:
    """[N, K] BF16 or FP32 -> float8_e4m3fn [N, K]: e4m3(w / s), ties to even. A row does not depend on the others,
    so the codes of some rows are some rows of the codes."""
    scaled = weight.to(torch.float32) / channel_scales(weight).unsqueeze(1)
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def dequantize_channels(codes: Tensor, scales: Tensor) -> Tensor:
    """(float8_e4m3fn [N, K], FP32 [N]) -> float64 [N, K], exact."""
    return codes.to(torch.float64) * scales.to(torch.float64).unsqueeze(1)
