"""E8M0 scales are copied as numbers instead of bytes: 2^-6 becomes 0."""

import torch

from workloads.loading.loader import Loader
from workloads.loading.mapping import Destination


class Fault(Loader):
    def place(self, destination: Destination, tensor: torch.Tensor) -> None:
        if destination.placement.source.endswith("weight_scale"):
            tensor = tensor.view(torch.float8_e8m0fnu).to(torch.uint8)
        super().place(destination, tensor)
