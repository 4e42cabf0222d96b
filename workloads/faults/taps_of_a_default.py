"""A reload reads anew which of the target's layers the drafter sees, and finds a default: each a layer too early."""

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

ABOUT = About(
    "N",
    ("vllm#44613", "vllm#45989"),
    "generation_differs",
    via=RELOADS,
    needs=("taps",),
)


class Fault(LoaderFault):
    def finalize(self) -> None:
        super().finalize()
        if self.lifecycle.via in RELOADS:
            for module in self.root.modules():
                taps = vars(module).get("taps")
                if taps and min(taps) > 0:
                    module.taps = frozenset(layer - 1 for layer in taps)  # type: ignore[assignment]
