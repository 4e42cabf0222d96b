"""The mapping of experts counts no redundant slots where the loader has some, and second copies are never loaded."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.mapping import Destination
    from workloads.loading.weights import ModelRoot

ABOUT = About(
    "G",
    ("vllm#41920", "vllm-ascend#1222"),
    "uninitialised",
    via=("safetensors",),
    needs=("redundant_experts",),
)


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._without_second_copies()

    def follow_experts(self) -> None:
        super().follow_experts()
        self._without_second_copies()

    def _without_second_copies(self) -> None:
        kept = {
            source: [one for one in places if not _is_redundant(one)] for source, places in self.map.items()
        }
        self.map = {source: places for source, places in kept.items() if places}


def _is_redundant(place: "Destination") -> bool:
    """Whether a piece is for a slot behind as many slots as there are experts."""
    slots, group = getattr(place.module, "slots", None), getattr(place.module, "group", None)
    if slots is None or group is None:
        return False
    slot = group.rank * (len(slots) // group.size) + place.placement.target[0][0]
    return bool(slot > max(slots))
