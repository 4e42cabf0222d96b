"""A rebuild on reload reads a setting that was set only while the engine started, and finds its default."""

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

ABOUT = About("N", ("vllm#44613", "vllm#45989"), "wrong_derived", via=RELOADS, needs=("derivations",))


class Fault(LoaderFault):
    def finalize(self) -> None:
        super().finalize()
        if self.lifecycle.via in RELOADS:
            for _, module in self.root.weight_modules():
                for name in module.derivations():
                    getattr(module, name).mul_(0.5)  # what the setting's default amounts to
