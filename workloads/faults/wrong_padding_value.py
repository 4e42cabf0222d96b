"""Padding is filled with zero whatever value the parameter was created with (unit scales become 2^-127)."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "C",
    ("pull request that replaces vllm#50523",),
    "wrong_padding_value",
    needs=("unit_padding",),
)


class Fault(LoaderFault):
    def fill(self, path: str, module: "WeightModule") -> None:
        for boxes in module.padding_regions.values():
            boxes.update(dict.fromkeys(boxes, 0.0))
        super().fill(path, module)
