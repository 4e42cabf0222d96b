"""Post-processing leaves parameters without their own loader, and the default one knows only whole tensors."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    import torch

    from workloads.loading.mapping import Destination

ABOUT = About(
    "D",
    ("vllm#17915", "vllm-ascend#13337"),
    CRASH,
    via=RELOADS,
    needs=("fused",),
)


class Fault(LoaderFault):
    """Raises ValueError for a tensor that is not the whole parameter."""

    def place(self, destination: "Destination", tensor: "torch.Tensor") -> None:
        parameter = destination.module.live(destination.parameter)
        if self.lifecycle.via in RELOADS and parameter is not None and parameter.shape != tensor.shape:
            raise ValueError(
                f"{destination.path}.{destination.parameter} has shape {tuple(parameter.shape)}, and "
                f"{destination.placement.source} has {tuple(tensor.shape)}."
            )
        super().place(destination, tensor)
