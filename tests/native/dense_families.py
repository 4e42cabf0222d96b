"""Toys of the families that are built on the ordinary decoder, and prompts that reach all of them."""

from pathlib import Path
from typing import Any

import torch

from workloads.engines.protocol import Prompt
from workloads.loading.checkpoint import open_checkpoint
from workloads.loading.generate import generate_checkpoint
from workloads.models.batch import Batch, Segment
from workloads.models.medusa.config import MedusaConfig
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.parallel import ALONE

VARIANTS: dict[str, Any] = {
    "openpangu": OpenPanguConfig(num_layers=2),
    "openpangu_vl": OpenPanguConfig(num_layers=2, vision=True),
    "minicpm_o": MiniCpmConfig(num_layers=2),
    "minicpm_v": MiniCpmConfig(num_layers=2, audio_frames=[]),
    "medusa": MedusaConfig(num_layers=2),
}
MEDIA = Prompt(
    "media", (65, *range(258, 300), 66, *range(318, 330), 67)
)  # images and sounds, where there are any


def checkpoint(folder: Path, variant: str) -> Path:
    """The variant's checkpoint, seed 0, made below `folder` at the first call."""
    torch.set_num_threads(1)
    return generate_checkpoint(VARIANTS[variant], 0, folder / variant)


def widened(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint in float64, by name."""
    reader = open_checkpoint(folder)
    return {name: reader.get(name).to(torch.float64) for name in reader.names()}


def whole_prompt(token_ids: list[int]) -> Batch:
    """One request from its start, on one rank."""
    return Batch(token_ids, [Segment(0, 0, len(token_ids), 0)], ALONE, torch.device("cpu"))


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference beside the norm of what is expected."""
    return float((value.to(torch.float64) - expected).norm() / expected.norm())
