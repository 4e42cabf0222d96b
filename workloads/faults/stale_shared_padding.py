"""A reload fills the padding of FP8 shared experts with nothing: their scales there stay what fresh memory held."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "C",
    ("pull request that replaces vllm#50523, which leaves DeepSeek-V4.1's shared experts out",),
    "stale_padding",
    via=RELOADS,
    needs=("shared_padding",),
)


class Fault(LoaderFault):
    def fill(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via in RELOADS and ".shared_experts." in path:
            module.padding_regions.clear()
        super().fill(path, module)
