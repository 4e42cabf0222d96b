"""The first two expert-parallel ranks load each other's experts."""

import re
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About("G", ("vllm#51130",), "found_elsewhere", needs=("numbered_experts", "ep"))
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


class Fault(LoaderFault):
    """Raises ValueError in a rank that holds every expert: without expert parallelism there is nobody to swap with."""

    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        local = sorted({int(found.group()) for source in self.map if (found := _EXPERT.search(source))})
        ep_rank = local[0] // len(local)
        shift = {0: len(local), 1: -len(local)}.get(ep_rank, 0)
        self.map = {
            _EXPERT.sub(lambda found: str(int(found.group()) + shift), source): places
            for source, places in self.map.items()
        }
