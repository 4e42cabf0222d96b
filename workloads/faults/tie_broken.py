"""Tied weights become copies of their own, and a reload of the one does not reach the other."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.loader import Reader, UpdateStats

ABOUT = About("H", ("vllm#51665",), "alias_broken", via=RELOADS, needs=("tied", "safetensors"))


class Fault(LoaderFault):
    def cold(self, reader: "Reader") -> "UpdateStats":
        stats = super().cold(reader)
        self._untie()
        return stats

    def _untie(self) -> None:
        from torch import nn

        seen: set[int] = set()
        for _, module in self.root.weight_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.data_ptr() in seen:
                    module.register_parameter(name, nn.Parameter(parameter.clone(), requires_grad=False))
                seen.add(parameter.data_ptr())
