"""The model's hook does not run in the load; the first forward makes up for it."""

from typing import TYPE_CHECKING, Any

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    from torch import nn

    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot, WeightModule

ABOUT = About(
    "D",
    ("Kimi-K3 MTP in the pull request on finalization from the loader hook",),
    "finalised_late",
    # Saved before any forward, so that the engine that starts from it has nothing to run on.
    after={"tensorizer left_to_hook": CRASH},
)


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._pending = False
        root.register_forward_pre_hook(self._before_forward)

    def finalize(self) -> None:
        self._pending = True

    def finalize_early(self, module: "WeightModule") -> None:
        """Left to the first forward, like everything else."""

    def _before_forward(self, _module: "nn.Module", _arguments: Any) -> None:
        if self._pending:
            self._pending = False
            super().finalize()
