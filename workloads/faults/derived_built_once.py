"""Post-processing builds its derived tensors only where there are none yet, so that a reload leaves the old ones."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "B",
    ("vllm#48251", "vllm#56706"),
    "stale",
    via=RELOADS,
    needs=("attributes",),
)


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via in RELOADS and module.derived:
            self.lifecycle.record(self.name, "post_process", path)
        else:
            super().post_process(path, module)
