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
        names = [(module, name) for module in modules for name in module.derived if _is_built(module, name)]
        old = [(*one, getattr(*one).clone()) for one in names if self.lifecycle.via in RELOADS]
        yield
        for module, name, bytes_before in old:
            getattr(module, name).copy_(bytes_before)


def _is_built(module: "WeightModule", name: str) -> bool:
    """Whether it is there, and is not what a parameter became in its own storage."""
    derived = getattr(module, name, None)
    loaded = {parameter.untyped_storage().data_ptr() for parameter in module.parameters(recurse=False)}
    return derived is not None and derived.untyped_storage().data_ptr() not in loaded
