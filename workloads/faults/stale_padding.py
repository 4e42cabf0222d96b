"""Padding is not filled on a reload: it keeps what the memory held before."""

from workloads.faults import RELOADS
from workloads.loading.loader import Loader
from workloads.loading.weights import WeightModule


class Fault(Loader):
    def fill(self, path: str, module: WeightModule) -> None:
        if self.lifecycle.via in RELOADS:
            module.padding_regions.clear()
        super().fill(path, module)
