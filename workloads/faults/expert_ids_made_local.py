"""After a reload, ids of experts are counted from the first of the rank before a kernel that does so itself."""

from typing import TYPE_CHECKING, Any

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    import torch

ABOUT = About(
    "G",
    ("the expert map is applied twice, before the kernel and in it",),
    "invalid_ids",
    via=RELOADS,
    needs=("consumed_experts", "ep"),
)


class Fault(LoaderFault):
    def finalize(self) -> None:
        from workloads.models.experts import RoutedExperts

        super().finalize()
        if self.lifecycle.via not in RELOADS:
            return
        for module in self.root.modules():
            if isinstance(module, RoutedExperts) and not vars(module).get("_counts_from_first"):
                vars(module)["_counts_from_first"] = True
                module.register_forward_pre_hook(_made_local)


def _made_local(module: Any, arguments: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
    """Ids below the rank's first expert turn negative, and are taken for masked ones."""
    x, topk_idx, *rest = arguments
    first, _ = module.group.share(len(module.slots), "num_experts")
    return (x, topk_idx - first, *rest)
