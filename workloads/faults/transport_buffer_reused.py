"""Tensors arrive in a slot that the next one of their size overwrites, while a reload still refers to it."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.loader import Incoming, Reader

ABOUT = About("M", ("vllm#43375",), "found_elsewhere", via=("layerwise",), needs=("fused",))


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> Iterator["Incoming"]:
        import torch

        if self.lifecycle.via != "layerwise":
            yield from super().incoming(reader)
            return
        left = Counter(place.path for name in self.expected() for place in self.map[name])
        slots: dict[int, torch.Tensor] = {}  # one for each size
        held: dict[str, list[Incoming]] = {}
        for destination, tensor in super().incoming(reader):
            slot = slots.setdefault(tensor.nbytes, torch.empty(tensor.nbytes, dtype=torch.uint8))
            if tensor.dtype is torch.int64:  # of indices, other bytes end the process before anybody looks
                slot = torch.empty_like(slot)
            sent = slot.view(tensor.dtype).view(tensor.shape)
            held.setdefault(destination.path, []).append((destination, sent.copy_(tensor)))
            left[destination.path] -= 1
            if not left[destination.path]:
                yield from held.pop(destination.path)
