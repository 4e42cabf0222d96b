"""A reload does not reach the model's hook, so what only the hook rebuilds stays old."""

from workloads.faults import RELOADS
from workloads.loading.loader import Loader


class Fault(Loader):
    def finalize(self) -> None:
        if self.lifecycle.via not in RELOADS:
            super().finalize()
