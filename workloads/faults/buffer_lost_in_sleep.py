"""Sleep of level 2 discards buffers with the weights, and nothing builds them again after the reload."""

from typing import TYPE_CHECKING

from workloads.faults import EngineFault, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About("F", ("vllm#16564", "OpenRLHF#723"), "uninitialised", via=("sleep2",), needs=("buffers",))


class Fault(LoaderFault):
    slept = False

    def post_process(self, path: str, module: "WeightModule") -> None:
        if self.slept and any(True for _ in module.buffers(recurse=False)):
            self.lifecycle.record(self.name, "post_process", path)
        else:
            super().post_process(path, module)


class InEngine(EngineFault):
    def sleep(self, level: int) -> None:
        super().sleep(level)
        for loader in self.loaders.values():
            loader.slept = level == 2  # type: ignore[attr-defined]
