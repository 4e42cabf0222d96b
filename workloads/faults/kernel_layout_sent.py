"""The sender of an update gives scales in its kernel's order, and the receiver takes them for the checkpoint's."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.loader import Incoming, Reader

ABOUT = About("I", ("vime#133",), "wrong_layout", via=RELOADS, needs=("e8m0",))


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> Iterator["Incoming"]:
        for destination, tensor in super().incoming(reader):
            is_matrix = tensor.dim() > 1 and "scale" in destination.placement.source
            if self.lifecycle.via in RELOADS and is_matrix:
                tensor = tensor.transpose(-1, -2).contiguous().view(tensor.shape)
            yield destination, tensor
