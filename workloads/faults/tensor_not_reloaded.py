"""One tensor of the target is left out of every reload, and the reload still reports success."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    from workloads.loading.loader import Incoming, Reader

ABOUT = About("H", ("trl#6028", "verl#6256"), "stale", via=RELOADS, after=DISCARDED)


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> Iterator["Incoming"]:
        left_out = next((name for name in self.map if "layers.1." in name and "norm" in name), "")
        for destination, tensor in super().incoming(reader):
            if self.lifecycle.via not in RELOADS or destination.placement.source != left_out:
                yield destination, tensor
