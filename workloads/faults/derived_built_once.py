"""Post-processing keeps the derived tensors that it built first, so that a reload leaves the old ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About("B", ("vllm#48251", "vllm#56706"), "stale", via=RELOADS, needs=("attributes",), after=DISCARDED)


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        with self._kept([module]):
            super().post_process(path, module)

    def finalize(self) -> None:
        with self._kept([module for _, module in self.root.weight_modules()]):
            super().finalize()

    @contextmanager
    def _kept(self, modules: "list[WeightModule]") -> Iterator[None]:
        """Whatever derived tensors there are, they end as they were."""
        held = [(module, name, getattr(module, name, None)) for module in modules for name in module.derived]
        old = [(*one, one[2].clone()) for one in held if self.lifecycle.via in RELOADS and one[2] is not None]
        yield
        for module, name, _, bytes_before in old:
            getattr(module, name).copy_(bytes_before)
