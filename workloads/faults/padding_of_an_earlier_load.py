"""Padding that an earlier load with another split had recorded is filled again, over rows that are real now."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import Region, WeightModule

ABOUT = About(
    "C",
    ("pull request that replaces vllm#50523",),
    "overwritten_by_padding",
    via=RELOADS,
    needs=("padding",),
)


class Fault(LoaderFault):
    def fill(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via in RELOADS:
            for boxes in module.padding_regions.values():
                boxes.update({_earlier(box): value for box, value in boxes.items()})
        super().fill(path, module)


def _earlier(box: "Region") -> "Region":
    """The same padding where the split left one row or column less before it."""
    dim = max(range(len(box)), key=lambda d: box[d][0])  # padding follows what is real
    start, length = box[dim]
    return (*box[:dim], (start - 1, length + 1), *box[dim + 1 :])
