"""The first two expert-parallel ranks load each other's experts."""

import re

from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.weights import ModelRoot

_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


class Fault(Loader):
    """Raises ValueError in a rank that holds every expert: without expert parallelism there is nobody to swap with."""

    def __init__(self, name: str, root: ModelRoot, lifecycle: Lifecycle) -> None:
        super().__init__(name, root, lifecycle)
        local = sorted({int(found.group()) for source in self.map if (found := _EXPERT.search(source))})
        ep_rank = local[0] // len(local)
        shift = {0: len(local), 1: -len(local)}.get(ep_rank, 0)
        self.map = {
            _EXPERT.sub(lambda found: str(int(found.group()) + shift), source): places
            for source, places in self.map.items()
        }
