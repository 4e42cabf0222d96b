"""An update brings a drafter that was made for a target of which it sees fewer layers."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    import torch

    from workloads.loading.mapping import Destination

ABOUT = About(
    "K",
    (
        "a drafter whose number of tapped layers is not its target's feeds its projection what it was not made for",
    ),
    CRASH,
    via=RELOADS,
    needs=("taps",),
)
PROJECTIONS = ("context_proj.weight", "mtp.0.main_proj.weight")


class Fault(LoaderFault):
    def place(self, destination: "Destination", tensor: "torch.Tensor") -> None:
        if self.lifecycle.via in RELOADS and destination.placement.source in PROJECTIONS:
            tensor = tensor[:, : tensor.shape[1] // 2]
        super().place(destination, tensor)
