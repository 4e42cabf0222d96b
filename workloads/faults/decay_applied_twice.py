"""Post-processing turns a decay into -exp of itself in place, and a reload of what it made does so once more."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About("E", ("vllm#48284",), "processed_twice", via=RELOADS, needs=("decay",))


class Fault(LoaderFault):
    """The kernel takes the logarithm and applies -exp itself, so that once in place is once too often."""

    def post_process(self, path: str, module: "WeightModule") -> None:
        super().post_process(path, module)
        if self.lifecycle.via in RELOADS and "A_log" in module.weights:
            decay = module.get_parameter("A_log")
            decay.copy_(-decay.exp())
