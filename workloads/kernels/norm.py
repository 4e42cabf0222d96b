"""Normalisations over the last dimension, computed in float64."""

import torch

from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import round_to_bf16


def rms_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept as a dimension of length 1; float64."""
    wide = x.to(torch.float64)
    return torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)  # square() is several times slower


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] times `rms_scale` times weight [H], as BF16 [..., H] rounded once.

    The weight is not offset by one, and nothing is rounded between the scale and the weight.
    """
    scale = weight.to(torch.float64)

    def normalised(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.to(torch.float64)
        return round_to_bf16(wide * rms_scale(wide, eps) * scale)

    return by_rows(normalised, x)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) times weight [H] plus bias [H], as BF16 [..., H] rounded once."""
    wide = x.to(torch.float64)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    return round_to_bf16(
        centred * rms_scale(centred, eps) * weight.to(torch.float64) + bias.to(torch.float64)
    )


def l2_normalise(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., D] / sqrt(sum(x^2) + eps), as float64 [..., D]; `eps` sits inside the root."""
    wide = x.to(torch.float64)
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)
