"""A wrapper has the model's hook to itself and does not hand it on to the language model inside."""

from typing import TYPE_CHECKING, Any

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About(
    "J",
    ("DeepSeek-V4's vision wrapper in the pull request on finalization from the loader hook",),
    "uninitialised",
    needs=("wrapper",),
)


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        inside: Any = getattr(root, "language_model", None)
        if inside is not None:
            inside.process_weights_after_loading = lambda: None
