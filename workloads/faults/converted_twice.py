"""Post-processing turns experts into the kernel's order in place, and does it twice in one load."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "E", ("vllm#42821", "vllm#48284", "SkyRL#1680"), "wrong_layout", needs=("in_place", "kernel_object")
)


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        super().post_process(path, module)
        if "RoutedExperts" in type(module).__name__:
            module.post_process()
