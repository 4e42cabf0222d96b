"""A reload does not reach the model's hook, so what only the hook rebuilds stays old."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About("J", ("vllm#54477", "vllm#51368"), "skipped_hook", via=RELOADS)


class Fault(LoaderFault):
    def finalize(self) -> None:
        if self.lifecycle.via not in RELOADS:
            super().finalize()

    def finalize_early(self, module: "WeightModule") -> None:
        """Only reloads come here."""
