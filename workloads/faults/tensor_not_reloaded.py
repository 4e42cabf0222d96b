"""One tensor of the target is left out of every reload, and the reload still reports success."""

from collections.abc import Iterator

from workloads.faults import RELOADS
from workloads.loading.loader import Incoming, Loader, Reader

LEFT_OUT = "layers.1.input_layernorm.weight"


class Fault(Loader):
    def incoming(self, reader: Reader) -> Iterator[Incoming]:
        for destination, tensor in super().incoming(reader):
            if self.lifecycle.via not in RELOADS or not destination.placement.source.endswith(LEFT_OUT):
                yield destination, tensor
