"""The pipeline stage of one rank: which layers it has, and what comes in from the stage before and goes to the next."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from workloads.models.parallel import ALONE, Group, receive_from_previous, send_to_next
from workloads.models.stages import stage_layers


@dataclass(frozen=True)
class Stage:
    """layers: of this stage, numbered in the whole model. Without pipeline parallelism it is the whole model."""

    layers: range
    pp: Group = ALONE

    @classmethod
    def of(cls, pp: Group, layers: int) -> "Stage":
        """layers: of the whole model."""
        return cls(stage_layers(layers, pp.size, pp.rank), pp)

    @property
    def is_first(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    def count_before(self, layers: Collection[int]) -> int:
        """How many of these layers lie in earlier stages."""
        return sum(layer < self.layers.start for layer in layers)

    def receive(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> list[torch.Tensor]:
        """What the stage before sent of this rank's tokens. Collective with it."""
        return receive_from_previous(self.pp, shapes, device, dtype)

    def send(self, *states: torch.Tensor) -> None:
        """Give the next stage what it receives; nothing to do in the last."""
        if not self.is_last:
            send_to_next(self.pp, states)
