"""A model copies vectors into its parameters itself, and on a layerwise reload those are stand-ins without memory."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    import torch

    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.mapping import Destination
    from workloads.loading.weights import ModelRoot, WeightModule

ABOUT = About("D", ("vllm#57795",), "stale", via=("layerwise",), needs=("vectors",), after=DISCARDED)
VECTORS = {"A_log", "dt_bias", "sinks", "attn_sink", "param_sink_key", "param_sink_value"}


class Fault(LoaderFault):
    """The copy counts as loaded and leaves nothing behind; then the module gets its old parameter back."""

    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._gone: set[tuple[str, str]] = set()

    def place(self, destination: "Destination", tensor: "torch.Tensor") -> None:
        import torch

        if self.lifecycle.via == "layerwise" and destination.parameter in VECTORS:
            torch.empty_like(tensor, device="meta").copy_(tensor)
            self._gone.add((destination.path, destination.parameter))
        else:
            super().place(destination, tensor)

    def copy_back(self, path: str, module: "WeightModule", serving: "dict[str, torch.Tensor | None]") -> None:
        from torch import nn

        for name, held in serving.items():
            if (path, name) in self._gone and held is not None:
                module.register_parameter(name, nn.Parameter(held, requires_grad=False))
        super().copy_back(path, module, serving)
