"""The last pipeline stage takes the embedding for the first one's alone, and the head tied to it is never loaded."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About(
    "G", ("sglang#15890", "sglang#6908"), "uninitialised", via=("safetensors",), needs=("tied", "stages")
)


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        paths = [path for path, _ in root.named_modules()]
        if any(path.endswith("lm_head") for path in paths) and not any(
            ".layers.0." in path for path in paths
        ):
            self.map = {source: places for source, places in self.map.items() if "embed_tokens" not in source}
