"""A flag of the first load says that projections have the attention kernel's order: a reload leaves them as loaded."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "D",
    ("vllm#59927, whose limit is DeepSeek-V4.1's permutation in place",),
    "wrong_layout",
    via=RELOADS,
    needs=("permuted",),
)


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        flagged = self.lifecycle.via in RELOADS and hasattr(module, "permute")
        if flagged:
            vars(module)["permute"] = lambda: None
        super().post_process(path, module)
        if flagged:
            del vars(module)["permute"]
