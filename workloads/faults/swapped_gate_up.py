"""Gate and up of every routed expert land in each other's rows."""

import re
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About("D", ("vllm#42821", "SkyRL#1680"), "found_elsewhere", needs=("numbered_experts",))
_GATE_OR_UP = re.compile(r"(?<=\.)(?:w[13]|gate_proj|up_proj)(?=\.weight)")
_OTHER = {"w1": "w3", "w3": "w1", "gate_proj": "up_proj", "up_proj": "gate_proj"}


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self.map = {
            _GATE_OR_UP.sub(lambda found: _OTHER[found.group()], source)
            if ".experts." in source
            else source: places
            for source, places in self.map.items()
        }
