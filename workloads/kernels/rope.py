"""Rotary position embedding on half-split pairs: channel i turns with channel i + D/2."""

import torch
from torch import Tensor

from workloads.kernels.linear import round_to_bf16


def rope_table(positions: int, dim: int, theta: float) -> Tensor:
    """float32 [positions, dim]: cosines of the dim/2 angles of each position, then their sines.

    Angle i of position p is p * theta^(-2i/dim) (Su et al., RoFormer), computed in float64 and rounded once.
    """
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(torch.float32)


def rotate_half_split(x: Tensor, table: Tensor) -> Tensor:
    """x BF16 [T, heads, D] turned by the rows of a `rope_table`, one for each token: float32 [T, D] -> BF16.

    (a, b) -> (a cos - b sin, b cos + a sin), where a is the first half of the channels; one rounding.
    """
    cos, sin = table.to(torch.float64).unsqueeze(1).chunk(2, dim=-1)
    first, second = x.to(torch.float64).chunk(2, dim=-1)
    return round_to_bf16(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
