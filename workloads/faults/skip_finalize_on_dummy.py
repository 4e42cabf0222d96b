"""A dummy load does not reach the model's hook, and the first forward finds its experts unfinished."""

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

ABOUT = About(
    "J",
    ("vllm#59927",),
    CRASH,
    via=("dummy",),
    needs=("kernel_layout",),
)


class Fault(LoaderFault):
    def finalize(self) -> None:
        if self.lifecycle.via != "dummy":
            super().finalize()
