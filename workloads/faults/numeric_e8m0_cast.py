"""E8M0 scales are copied as numbers instead of bytes: 2^-6 becomes 0."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    import torch

    from workloads.loading.mapping import Destination

ABOUT = About("I", ("review of DeepSeek-V4.1's uint8 scales",), "numeric_cast", needs=("e8m0",))


class Fault(LoaderFault):
    def place(self, destination: "Destination", tensor: "torch.Tensor") -> None:
        import torch

        bytes_of_exponents = tensor.dtype in (torch.uint8, torch.float8_e8m0fnu)
        if bytes_of_exponents and "scale" in destination.placement.source:
            tensor = tensor.view(torch.float8_e8m0fnu).to(torch.uint8)
        super().place(destination, tensor)
