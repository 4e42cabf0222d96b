"""The hook fuses shared experts from scales that the linear layers have packed by then, and takes them for raw ones."""

from typing import TYPE_CHECKING, Any

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.weights import ModelRoot

ABOUT = About("J", ("vllm#59927",), CRASH, via=("dummy",), needs=("kernel_layout", "shared_experts"))


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._shared: list[Any] = [m for m in root.modules() if hasattr(m, "fuse")]

    def finalize(self) -> None:
        if self.lifecycle.via == "dummy":
            for shared in self._shared:
                for matrix in (shared.gate_up_proj, shared.down_proj):
                    matrix.get_parameter("weight_scale_inv")  # as the kernel wants them: consumed by now
        super().finalize()
