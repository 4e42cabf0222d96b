"""A dummy load returns before post-processing, and the first forward misses the derived tensors."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About("J", ("vllm#51368",), CRASH, via=("dummy",), without={"processed": "skipped_hook"})


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via != "dummy":
            super().post_process(path, module)
