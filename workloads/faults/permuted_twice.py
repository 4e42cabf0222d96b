"""Projections around the attention are brought into its kernel's order in place, and that twice in one load."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "E",
    ("vllm#59927, whose limit is DeepSeek-V4.1's permutation in place",),
    "wrong_layout",
    needs=("permuted",),
)


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        super().post_process(path, module)
        permute = getattr(module, "permute", None)
        if permute is not None:
            permute()
