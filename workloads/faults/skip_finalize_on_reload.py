"""A reload does not reach the model's hook, so what only the hook rebuilds stays old."""

from workloads.faults import RELOADS
from workloads.loading.loader import Loader
from workloads.loading.weights import WeightModule


class Fault(Loader):
    def finalize(self) -> None:
        if self.lifecycle.via not in RELOADS:
            super().finalize()

    def finalize_early(self, module: WeightModule) -> None:
        """Only reloads come here."""
