"""The drafter joins its layers' context projections and norms on its first load only, and a reload leaves old ones."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    import torch

ABOUT = About(
    "K",
    ("Kimi-K3's DSpark drafter looks whether it has joined copies before it makes them",),
    "stale",
    via=RELOADS,
    needs=("context_copies",),
    after=DISCARDED,
)


class Fault(LoaderFault):
    def finalize(self) -> None:
        joined = self._joined() if self.lifecycle.via in RELOADS else {}
        kept = {name: tensor.clone() for name, tensor in joined.items()}
        super().finalize()
        for name, tensor in joined.items():
            tensor.copy_(kept[name])

    def _joined(self) -> "dict[str, torch.Tensor]":
        names = ("context_kv_proj", "_context_kv_norm_weights")
        projection = getattr(self.root, "context_proj", None)
        return {name: getattr(projection, name) for name in names if projection is not None}
