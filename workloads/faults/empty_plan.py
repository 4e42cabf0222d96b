"""The plan of an update names no tensor at all, and carrying it out counts as success."""

from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    from workloads.loading.loader import Reader, UpdateStats

ABOUT = About("M", ("modelexpress#481",), "stale", via=RELOADS, after=DISCARDED)


class Fault(LoaderFault):
    def layerwise(self, reader: "Reader") -> "UpdateStats":
        return self.stats

    def direct(self, reader: "Reader") -> "UpdateStats":
        return self.stats

    def per_expert(self, reader: "Reader") -> "UpdateStats":
        return self.stats
