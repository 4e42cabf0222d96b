"""Derived tensors that are plain attributes are built into new storage on a reload, not refreshed in place.

Registered buffers are left alone: the loader itself refuses a reload that moves one.
"""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "A",
    ("vllm#48251", "vllm#52626"),
    "moved",
    via=RELOADS,
    needs=("attributes",),
)


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via in RELOADS:
            for name in module.derived & vars(module).keys():
                setattr(module, name, None)
        super().post_process(path, module)
