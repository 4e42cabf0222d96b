"""Rotary position embedding on neighbouring channels (2i, 2i+1), as DeepSeek applies it, with its form of YaRN."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workloads.kernels.linear import round_to_bf16


class Yarn(NamedTuple):
    """Stretch of a context of `original` positions by `factor`; beta_fast and beta_slow: turns within the original
    context above which a pair keeps its frequency and below which it is divided by the factor."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float


def deepseek_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """Angle of each pair per position, theta^(-2i/dim): float64 [dim/2].

    With YaRN, frequency f becomes f/factor * ramp + f * (1 - ramp), where the ramp rises from 0 to 1 between the
    pairs that turn beta_fast and beta_slow times, their numbers rounded outwards and kept within 0..dim-1.
    """
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return frequencies

    def pair(turns: float) -> float:
        return dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def cos_sin_rows(positions: Tensor, frequencies: Tensor) -> Tensor:
    """float32 [T, 2, D/2]: cosine and sine of every angle at int64 [T], computed in float64 and rounded once."""
    angles = positions.to(torch.float64).unsqueeze(1) * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(torch.float32)


def cos_sin_table(positions: int, frequencies: Tensor) -> Tensor:
    """`cos_sin_rows` of the positions from 0 on: float32 [positions, 2, D/2]."""
    return cos_sin_rows(torch.arange(positions), frequencies)


def yarn_gain(factor: float, mscale: float) -> float:
    """What YaRN multiplies the scores by: (0.1 * mscale * ln(factor) + 1)^2, 1 without a stretch."""
    return (0.1 * mscale * math.log(factor) + 1) ** 2 if factor > 1 else 1.0


def rotated(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """The last channels of x turned, float64, not rounded.

    x: [T, ..., W]. cos_sin: float32 [T, 2, D/2], `cos_sin_rows` of the positions of the tokens; the last D
    of the W channels turn, pair (a, b) into (a cos - b sin, b cos + a sin). inverse: by the negative angle.
    """
    wide = x.to(torch.float64)
    dim = 2 * cos_sin.shape[-1]
    shape = (len(x), *(1,) * (x.dim() - 2), cos_sin.shape[-1])
    cos, sin = (part.to(torch.float64).view(shape) for part in cos_sin.unbind(1))
    sin = -sin if inverse else sin
    even, odd = wide[..., -dim::2], wide[..., -dim + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([wide[..., :-dim], turned], dim=-1)


def rotate(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """`rotated`, as BF16 rounded once."""
    return round_to_bf16(rotated(x, cos_sin, inverse))
