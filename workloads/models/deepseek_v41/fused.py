"""The two projections around a fused attention kernel, in the order in which it reads and writes.

Post-processing brings the weight into that order in the very storage it was loaded into, and its scales with it. It is
not its own inverse: done twice, or left out, the heads read one another's channels without an error. It belongs to what
a load brought, so it is done where the scales of that load are still there to be packed, and nowhere else.
"""

from abc import abstractmethod

import torch

from workloads.kernels.fused_attention_layout import deinterleave, interleave
from workloads.models.deepseek_v41.config import FP8_BLOCK, OUTPUT_CHUNK, QUERY_CHUNK
from workloads.models.fp8_linear import Fp8GroupedLinear, Fp8Linear, Fp8Matrix
from workloads.models.layers import Rows
from workloads.models.parallel import Group


class InKernelOrder(Fp8Matrix):
    """An FP8 matrix whose weight serves in another order than the one in which it is loaded."""

    @abstractmethod
    def served_weight(self, loaded: torch.Tensor) -> torch.Tensor:
        """uint8 [N, K] as loaded -> as the kernel wants it, a new tensor."""

    @abstractmethod
    def loaded_weight(self, served: torch.Tensor) -> torch.Tensor:
        """The inverse of `served_weight`."""

    def post_process(self) -> None:
        loaded = self.live("weight_scale_inv") is not None
        super().post_process()
        if loaded:
            self.permute()

    def permute(self) -> None:
        """Bring the loaded weight into the kernel's order, in place."""
        held = self.weight.detach().view(torch.uint8)
        held.copy_(self.served_weight(held))

    def as_loaded(self, name: str, live: torch.Tensor) -> torch.Tensor:
        if name != "weight" or self.live("weight_scale_inv") is not None:
            return live
        return self.loaded_weight(live.detach().view(torch.uint8)).view(live.dtype)


class QueryProjection(InKernelOrder, Fp8Linear):
    """`wq_b`: the rows of this rank's heads, chunks of 16 channels taking turns."""

    def __init__(self, group: Group, in_features: int, heads: int, dim: int, stem: str) -> None:
        super().__init__(group, in_features, [Rows(stem, heads * dim)], FP8_BLOCK)
        _, self.heads = group.share(heads, "num_heads")

    def served_weight(self, loaded: torch.Tensor) -> torch.Tensor:
        return interleave(loaded, 0, self.heads, QUERY_CHUNK)

    def loaded_weight(self, served: torch.Tensor) -> torch.Tensor:
        return deinterleave(served, 0, self.heads, QUERY_CHUNK)

    def served_scales(self, by_row: torch.Tensor) -> torch.Tensor:
        return self.served_weight(by_row)

    def loaded_scales(self, by_row: torch.Tensor) -> torch.Tensor:
        return self.loaded_weight(by_row)


class OutputProjection(InKernelOrder, Fp8GroupedLinear):
    """`wo_a`: the columns of the heads of a group, chunks of 32 channels taking turns."""

    def __init__(self, group: Group, groups: int, in_features: int, rows: int, heads: int, stem: str) -> None:
        """heads: of one group."""
        super().__init__(group, groups, in_features, rows, stem, FP8_BLOCK)
        self.heads = heads

    def served_weight(self, loaded: torch.Tensor) -> torch.Tensor:
        return interleave(loaded, 1, self.heads, OUTPUT_CHUNK)

    def loaded_weight(self, served: torch.Tensor) -> torch.Tensor:
        return deinterleave(served, 1, self.heads, OUTPUT_CHUNK)

    def served_scales(self, by_row: torch.Tensor) -> torch.Tensor:
        return interleave(by_row, 1, self.heads, OUTPUT_CHUNK // FP8_BLOCK)

    def loaded_scales(self, by_row: torch.Tensor) -> torch.Tensor:
        return deinterleave(by_row, 1, self.heads, OUTPUT_CHUNK // FP8_BLOCK)
