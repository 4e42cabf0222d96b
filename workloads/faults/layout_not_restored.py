"""A reload in place writes checkpoint tensors to parameters that the kernel's layout has taken the place of."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "D",
    ("verl#7978", "verl#7136"),
    CRASH,
    via=("direct",),
    needs=("kernel_layout",),
)


class Fault(LoaderFault):
    def restore_consumed(self, module: "WeightModule") -> None:
        """Forgotten."""
