"""A layerwise reload takes buffers from the memory that it made for them and that nothing has written."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About("F", ("vllm#44371",), "uninitialised", via=("layerwise",), needs=("buffers",))


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        from workloads.loading.weights import poison_

        super().post_process(path, module)
        if self.lifecycle.via == "layerwise":
            for name, buffer in module.named_buffers(recurse=False):
                if name in module.derived:
                    poison_(buffer)
