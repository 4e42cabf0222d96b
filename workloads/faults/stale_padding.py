"""Padding is not filled on a reload: it keeps what the memory held before."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "C",
    ("vllm#50523", "vllm#54699"),
    "stale_padding",
    via=RELOADS,
    needs=("padding",),
    where={"direct": ("kernel_state",)},  # else padding in place is as it was
)


class Fault(LoaderFault):
    def fill(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via in RELOADS:
            module.padding_regions.clear()
        super().fill(path, module)
