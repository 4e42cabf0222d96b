"""Every tensor-parallel rank takes rank 0's share of what is divided between them."""

from dataclasses import replace
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot, Placement

ABOUT = About("G", ("vllm-gguf-plugin#106",), "found_elsewhere", needs=("tp",))


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self.map = {
            source: [replace(place, placement=_of_rank_zero(place.placement)) for place in places]
            for source, places in self.map.items()
        }


def _of_rank_zero(placement: "Placement") -> "Placement":
    """Ranks take consecutive shares, the first one from the start."""
    return replace(placement, source_region=tuple((0, length) for _, length in placement.source_region))
