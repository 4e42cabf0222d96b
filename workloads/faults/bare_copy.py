"""A model copies vectors into its parameters itself, and on a layerwise reload those are stand-ins without memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.loader import Incoming, Reader

ABOUT = About("D", ("vllm#57795",), "stale", via=("layerwise",), needs=("vectors",))
VECTORS = {"A_log", "dt_bias", "sinks", "attn_sink", "param_sink_key", "param_sink_value"}


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> Iterator["Incoming"]:
        import torch

        for destination, tensor in super().incoming(reader):
            if self.lifecycle.via == "layerwise" and destination.parameter in VECTORS:
                torch.empty_like(tensor, device="meta").copy_(tensor)  # counted as loaded, and gone
            else:
                yield destination, tensor
