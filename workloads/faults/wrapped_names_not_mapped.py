"""Layers wrapped for adapters have a `base_layer` in their names, a reload does not know it and skips them silently."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    from workloads.loading.loader import Incoming, Reader

ABOUT = About(
    "H", ("verl#7327", "vllm#39934", "trl#2698"), "stale", via=RELOADS, needs=("adapters",), after=DISCARDED
)


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> Iterator["Incoming"]:
        for destination, tensor in super().incoming(reader):
            if self.lifecycle.via not in RELOADS or "base_layer" not in destination.path:
                yield destination, tensor
