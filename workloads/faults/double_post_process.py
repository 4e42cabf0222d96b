"""The hook runs twice in one load, and the second time takes the kernel's layout for the checkpoint's."""

from typing import Any

from workloads.faults import LoaderFault
from workloads.faults._about import About

ABOUT = About("E", ("vllm#48284",), "processed_twice", needs=("kernel_layout",))


class Fault(LoaderFault):
    def finalize(self) -> None:
        import torch
        from torch import nn

        super().finalize()
        for _, module in self.root.weight_modules():
            transformed: Any = getattr(module, "transformed", tuple)()
            if not transformed:
                continue
            for name, processed in zip(module.consumed_weights(), transformed, strict=True):
                taken_for_raw = processed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
                module.register_parameter(name, nn.Parameter(taken_for_raw, requires_grad=False))
        super().finalize()
