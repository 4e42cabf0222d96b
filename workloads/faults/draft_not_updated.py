"""An update reaches the target alone, and the drafter goes on proposing from the old weights."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    from workloads.loading.loader import Reader, UpdateStats

ABOUT = About(
    "K", ("vllm#52479", "vllm#46725", "sglang#31674"), "stale", via=RELOADS, needs=("draft",), after=DISCARDED
)


class Fault(LoaderFault):
    def layerwise(self, reader: "Reader") -> "UpdateStats":
        return self.stats if self.name == "draft" else super().layerwise(reader)

    def direct(self, reader: "Reader") -> "UpdateStats":
        return self.stats if self.name == "draft" else super().direct(reader)

    def per_expert(self, reader: "Reader") -> "UpdateStats":
        return self.stats if self.name == "draft" else super().per_expert(reader)
