"""Gate and up of every routed expert land in each other's rows."""

import re

from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.weights import ModelRoot

_GATE_OR_UP = re.compile(r"(?<=\.)w[13](?=\.weight_)")


class Fault(Loader):
    def __init__(self, name: str, root: ModelRoot, lifecycle: Lifecycle) -> None:
        super().__init__(name, root, lifecycle)
        self.map = {
            _GATE_OR_UP.sub(lambda found: {"w1": "w3", "w3": "w1"}[found.group()], source): places
            for source, places in self.map.items()
        }
