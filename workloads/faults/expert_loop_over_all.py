"""The loader walks all experts of the model where it holds only its own, and writes past its last one."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.mapping import Destination
    from workloads.loading.weights import ModelRoot

ABOUT = About("G", ("vllm#13784",), CRASH, via=("safetensors",), needs=("numbered_experts", "ep"))
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        local = sorted({int(found.group()) for source in self.map if (found := _EXPERT.search(source))})
        self.map = (
            {
                source: [
                    _at(place, int(found.group())) if (found := _EXPERT.search(source)) else place
                    for place in places
                ]
                for source, places in self.map.items()
            }
            if local and local[0]
            else self.map
        )


def _at(place: "Destination", expert: int) -> "Destination":
    """The same piece at the expert's number in the whole model."""
    (_, one), *rest = place.placement.target
    return replace(place, placement=replace(place.placement, target=((expert, one), *rest)))
