"""The model's hook does not run in the load; the first forward makes up for it."""

from typing import Any

from torch import nn

from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.weights import ModelRoot, WeightModule


class Fault(Loader):
    def __init__(self, name: str, root: ModelRoot, lifecycle: Lifecycle) -> None:
        super().__init__(name, root, lifecycle)
        self._pending = False
        root.register_forward_pre_hook(self._before_forward)

    def finalize(self) -> None:
        self._pending = True

    def finalize_early(self, module: WeightModule) -> None:
        """Left to the first forward, like everything else."""

    def _before_forward(self, _module: nn.Module, _arguments: Any) -> None:
        if self._pending:
            self._pending = False
            super().finalize()
