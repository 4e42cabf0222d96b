"""What stands in for the towers that encode images and sounds, and where their output enters a prompt."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from workloads.models.layers import ReplicatedLinear, RMSNorm, Rows


class MediaProjector(nn.Module):
    """From a tower's width to the language model's: one norm and one matrix, whole on every rank."""

    def __init__(self, width: int, hidden: int, eps: float, prefix: str) -> None:
        super().__init__()
        self.width = width
        self.norm = RMSNorm(width, eps, f"{prefix}norm.weight")
        self.proj = ReplicatedLinear(width, [Rows(f"{prefix}proj.weight", hidden)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """BF16 [rows, width] -> BF16 [rows, hidden]."""
        out: torch.Tensor = self.proj(self.norm(features))
        return out

    def encode(self, medium: int, rows: int) -> torch.Tensor:
        """What stands in for a medium of `rows` embeddings: BF16 [rows, hidden]."""
        projected: torch.Tensor = self(tower_features(medium, rows, self.width, self.norm.weight.device))
        return projected


def tower_features(medium: int, rows: int, width: int, device: torch.device) -> torch.Tensor:
    """What stands in for the output of a tower: multiples of 1/128 in [-1, 1] that look irregular, the same on every
    machine, others for every `medium`. BF16 [rows, width]."""
    row = torch.arange(rows, device=device).unsqueeze(1)
    column = torch.arange(width, device=device)
    mixed = (row * 7919 + column * 104729 + row * column * 31 + (medium + 1) * 1299709) % 257
    return ((mixed - 128).to(torch.float32) / 128).to(torch.bfloat16)


def fill_slots(
    embedded: torch.Tensor,
    token_ids: torch.Tensor,
    media: Sequence[range],
    encode: Callable[[int], torch.Tensor],
) -> None:
    """Write the embeddings of media over those of their ids.

    embedded: BF16 [n, hidden] of token_ids int64 [n]. encode: number of a medium -> BF16 [its ids, hidden].
    """
    for medium, ids in enumerate(media):
        inside = (token_ids >= ids.start) & (token_ids < ids.stop)
        if inside.any():
            embedded[inside] = encode(medium)[token_ids[inside] - ids.start]
