"""Gate and up of the shared experts are loaded where they belong, and their scales in each other's place."""

import re
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About(
    "D",
    ("vllm#42821: halves are exchanged for the kernel, and what belongs to them is not",),
    "found_elsewhere",
    needs=("shared_experts",),
    without={"many_scales": "checkpoint_mismatch"},  # two bytes do not say whose they are
)
_GATE_OR_UP = re.compile(r"(?<=\.shared_experts\.)w[13](?=\.scale)")
_OTHER = {"w1": "w3", "w3": "w1"}


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self.map = {
            _GATE_OR_UP.sub(lambda found: _OTHER[found.group()], source): places
            for source, places in self.map.items()
        }
