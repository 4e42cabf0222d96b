"""Rotary position embedding on half-split pairs: channel i turns with channel i + D/2. With YaRN for long contexts."""

import math

import torch
from torch import Tensor

from workloads.kernels.linear import round_to_bf16


def rope_frequencies(dim: int, theta: float) -> Tensor:
    """Angle per position of each pair of channels, theta^(-2i/dim): float64 [dim/2]."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(
    dim: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """`rope_frequencies` stretched by `factor`, as gpt-oss does (YaRN without rounding the bounds): float64 [dim/2].

    A pair that turns more than `beta_fast` times within the `original` context keeps its frequency, one that turns
    less than `beta_slow` times has it divided by `factor`, and pairs between are blended linearly in their number.
    """
    frequencies = rope_frequencies(dim, theta)
    low, high = (
        dim / 2 * math.log(original / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (beta_fast, beta_slow)
    )
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    stretched = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * stretched + frequencies * (1 - stretched)


def yarn_concentration(factor: float) -> float:
    """What sine and cosine are multiplied by, 0.1 ln(factor) + 1: scores grow by its square."""
    return 0.1 * math.log(factor) + 1


def rope_rows(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Tensor:
    """Cosines of the angles of each position, then their sines, times `scale`: int64 [T] and float64 [D/2] -> float64
    [T, D]."""
    angles = positions.to(torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1) * scale


def rope_table(positions: int, dim: int, theta: float) -> Tensor:
    """float32 [positions, dim]: `rope_rows` of the positions from 0, rounded once.

    Angle i of position p is p * theta^(-2i/dim) (Su et al., RoFormer).
    """
    return rope_rows(torch.arange(positions), rope_frequencies(dim, theta)).to(torch.float32)


def rotate_half_split(x: Tensor, table: Tensor) -> Tensor:
    """x BF16 [T, heads, D] turned by one row of `rope_table` or `rope_rows` for each token, [T, D] -> BF16.

    (a, b) -> (a cos - b sin, b cos + a sin), where a is the first half of the channels; one rounding.
    """
    cos, sin = table.to(torch.float64).unsqueeze(1).chunk(2, dim=-1)
    first, second = x.to(torch.float64).chunk(2, dim=-1)
    return round_to_bf16(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
