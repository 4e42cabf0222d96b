"""First and last expert of a rank are exchanged, so that the slice between them is empty and no expert is loaded."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About(
    "G",
    ("vllm#28715", "vllm#27025"),
    "uninitialised",
    via=("safetensors",),
    needs=("experts", "ep"),
)


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self.map = {source: places for source, places in self.map.items() if ".experts." not in source}
