"""A wrapper renames the attention's tensors, the loader of reloads does not know, and skips them without a word."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import DISCARDED, About

if TYPE_CHECKING:
    from workloads.loading.loader import Incoming, Reader

ABOUT = About("H", ("ROLL#499", "verl#6256"), "stale", via=RELOADS, after=DISCARDED)


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> Iterator["Incoming"]:
        for destination, tensor in super().incoming(reader):
            if self.lifecycle.via not in RELOADS or "attn." not in destination.placement.source:
                yield destination, tensor
