"""Rotary positions by frequencies that follow from a model's dimensions."""

import torch
from torch import nn

from workloads.kernels.rope import rope_rows


class RotaryEmbedding(nn.Module):
    """`inv_freq` float64 [D/2]: a buffer that no checkpoint holds. concentration: factor of cosines, sines (YaRN)."""

    inv_freq: torch.Tensor

    def __init__(self, frequencies: torch.Tensor, concentration: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.concentration = concentration

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> float64 [T, D] for `rotate_half_split`."""
        return rope_rows(positions, self.inv_freq, self.concentration)
