"""Post-processing puts bare parameters in place of its own, and the loader of such knows only whole tensors."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    import torch

    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.loader import UpdateStats
    from workloads.loading.mapping import Destination
    from workloads.loading.saved import ProcessedState
    from workloads.loading.weights import ModelRoot, WeightModule

ABOUT = About("D", ("vllm#17915", "vllm-ascend#13337"), CRASH, via=RELOADS, needs=("fused",))


class Fault(LoaderFault):
    """Raises ValueError for a tensor that is not the whole parameter."""

    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._bare: set[WeightModule] = (
            set()
        )  # modules whose parameters have lost what says how they are loaded

    def post_process(self, path: str, module: "WeightModule") -> None:
        super().post_process(path, module)
        self._lose(module)

    def serialized(self, saved: "ProcessedState") -> "UpdateStats":
        stats = super().serialized(saved)
        for _, module in self.root.weight_modules():
            self._lose(module)
        return stats

    def _lose(self, module: "WeightModule") -> None:
        from torch import nn

        self._bare.add(module)
        for name in module.weights:
            live = module.live(name)
            if live is not None:
                module.register_parameter(name, nn.Parameter(live.detach(), requires_grad=False))

    def place(self, destination: "Destination", tensor: "torch.Tensor") -> None:
        parameter = destination.module.live(destination.parameter)
        is_bare = destination.module in self._bare and parameter is not None
        if is_bare and parameter is not None and parameter.shape != tensor.shape:
            raise ValueError(
                f"{destination.path}.{destination.parameter} has shape {tuple(parameter.shape)}, and "
                f"{destination.placement.source} has {tuple(tensor.shape)}."
            )
        super().place(destination, tensor)
