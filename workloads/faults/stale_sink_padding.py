"""A reload does not give the attention sinks of padded heads their -inf: they stay what fresh memory held."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "C",
    ("pull request that replaces vllm#50523, which leaves sinks out", "vllm#57795"),
    "stale_padding",
    via=("layerwise",),  # in place they stay as they were
    needs=("sink_padding",),
)


class Fault(LoaderFault):
    def fill(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via == "layerwise" and type(module).__name__ == "AttentionSink":
            module.padding_regions.clear()
        super().fill(path, module)
