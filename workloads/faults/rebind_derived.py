"""Derived tensors are built into new storage on a reload instead of being refreshed in place."""

from workloads.faults import RELOADS
from workloads.loading.loader import Loader
from workloads.loading.weights import WeightModule


class Fault(Loader):
    def post_process(self, path: str, module: WeightModule) -> None:
        if self.lifecycle.via in RELOADS:
            for name in module.derived:
                setattr(module, name, None)
        super().post_process(path, module)
