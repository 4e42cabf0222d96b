"""An update leaves the drafter embedding and head of its own instead of its target's, where no later update comes."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.loader import Reader, UpdateStats
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "K",
    ("vllm#52479", "vllm#51665"),
    "alias_broken",
    via=RELOADS,
    needs=("taps",),
)


class Fault(LoaderFault):
    def layerwise(self, reader: "Reader") -> "UpdateStats":
        self._take_apart()
        return super().layerwise(reader)

    def direct(self, reader: "Reader") -> "UpdateStats":
        self._take_apart()
        return super().direct(reader)

    def per_expert(self, reader: "Reader") -> "UpdateStats":
        self._take_apart()
        return super().per_expert(reader)

    def _take_apart(self) -> None:
        for name in ("embed_tokens", "lm_head"):
            shared = getattr(self.root, name, None)
            if self.name == "draft" and shared is not None:
                setattr(self.root, name, _apart(shared))


def _apart(shared: "WeightModule") -> "WeightModule":
    """The same module over a copy of its parameters."""
    from copy import copy

    from torch import nn

    own = copy(shared)
    own._parameters = {
        name: nn.Parameter(parameter.clone(), requires_grad=False)
        for name, parameter in shared.named_parameters(recurse=False)
    }
    return own
