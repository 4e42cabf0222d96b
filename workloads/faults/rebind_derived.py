"""Plain-attribute derived tensors are built into new storage on a reload instead of being refreshed in place.

Registered buffers are left alone: the loader itself refuses a reload that moves one.
"""

from workloads.faults import RELOADS
from workloads.loading.loader import Loader
from workloads.loading.weights import WeightModule


class Fault(Loader):
    def post_process(self, path: str, module: WeightModule) -> None:
        if self.lifecycle.via in RELOADS:
            for name in module.derived & vars(module).keys():
                setattr(module, name, None)
        super().post_process(path, module)
