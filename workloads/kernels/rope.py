"""Rotary position embeddings: frequencies, YaRN's stretch for long contexts, rotation of half-split pairs."""

import math

import torch

from workloads.kernels.linear import round_to_bf16


def rope_frequencies(dim: int, theta: float) -> torch.Tensor:
    """Angle per position of each pair of channels, theta^(-2i/dim): float64 [dim/2]."""
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(
    dim: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
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


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int64 [T], frequencies float64 [D/2] -> (cos, sin) times `scale`, float64 [T, D/2]."""
    angles = positions.to(torch.float64).unsqueeze(1) * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotate_half_split(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x BF16 [T, N, D] with cos and sin float64 [T, D/2], as BF16 [T, N, D] rounded once.

    Channel i of the first half and channel i of the second are a pair.
    """
    first, second = x.to(torch.float64).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return round_to_bf16(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
