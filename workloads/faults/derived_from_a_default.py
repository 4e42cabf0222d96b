"""A rebuild on reload reads a setting that was set only while the engine started, and finds its default."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "N",
    ("vllm#44613", "vllm#45989"),
    "wrong_derived",
    via=RELOADS,
    needs=("attributes",),
)


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        super().post_process(path, module)
        if self.lifecycle.via in RELOADS:
            for name in module.derived & vars(module).keys():
                getattr(module, name).mul_(0.5)  # what the setting's default amounts to
