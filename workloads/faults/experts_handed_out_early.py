"""Load balancing is given the experts before the model's hook has brought them into the kernel's layout."""

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

ABOUT = About(
    "J",
    ("DeepSeek-V4 EPLB in the pull request on finalization from the loader hook", "vllm#59927"),
    CRASH,
    via=("safetensors",),
    needs=("kernel_layout", "rebalanced"),
)


class Fault(LoaderFault):
    def finalize(self) -> None:
        for module in self.paths:
            module.rebalance(1)
        super().finalize()
