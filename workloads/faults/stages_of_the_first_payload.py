"""Every pipeline stage is handed what the first one loads, and skips without a word what it does not know."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About("G", ("sglang#24655",), "stale", via=RELOADS, needs=("stages",), after=DISCARDED)


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._is_first_stage = any(".layers.0." in path for path, _ in root.named_modules())

    def expected(self) -> "Sequence[str]":
        """The embedding is what an end of the pipeline may share with the other."""
        sources = super().expected()
        if self._is_first_stage or self.lifecycle.via not in RELOADS:
            return sources
        return [source for source in sources if "embed" in source]
