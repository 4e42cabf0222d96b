"""Keys and values of the requests in flight, for attention that keeps every position."""

from dataclasses import dataclass

import torch

from workloads.models.batch import Segment


@dataclass
class KvCache:
    """Per request slot and position, as attention reads them: BF16 [slots, positions, local KV heads, D] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, slots: int, positions: int, heads: int, dim: int) -> "KvCache":
        keys, values = (torch.empty(slots, positions, heads, dim, dtype=torch.bfloat16) for _ in range(2))
        return cls(keys, values)

    def append(
        self, segment: Segment, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the segment's rows of a batch, BF16 [T, KV heads, D] each; returns all that its request's slot holds,
        [positions, KV heads, D] each."""
        held = self.keys[segment.slot], self.values[segment.slot]
        for rows, new in zip(held, (keys, values), strict=True):
            rows[segment.start : segment.end] = new[segment.rows]
        return held
