"""The hook of a dummy load does not reach the normed sink keys, which stay as they were created."""

from typing import TYPE_CHECKING, Any

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About(
    "B",
    ("OpenPangu in the pull request on finalization from the loader hook",),
    "wrong_derived",
    via=("dummy",),
    needs=("sinks",),
)


class Fault(LoaderFault):
    """As long as nothing has refreshed them they are zeros, and no kernel notices."""

    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._sinks: list[Any] = [m for _, m in root.weight_modules() if hasattr(m, "refresh_sink_key")]

    def finalize(self) -> None:
        super().finalize()
        if self.lifecycle.via == "dummy":
            for sink in self._sinks:
                sink.sink_key.zero_()
