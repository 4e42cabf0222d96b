"""A reload builds the kernel's object anew, and its tensors with it, while a captured graph holds the old ones."""

import copy
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About(
    "A",
    (
        "vllm#48438",
        "vllm#50521",
        "vllm#50538",
        "vllm#48902",
    ),
    "moved",
    via=RELOADS,
    needs=("kernel_state",),
)
TRANSFORMED = {"_transformed_l1_weights", "_transformed_l2_weights"}


class Fault(LoaderFault):
    def finalize(self) -> None:
        for _, module in self.root.weight_modules():
            self._forget(module)
        super().finalize()

    def finalize_early(self, module: "WeightModule") -> None:
        self._forget(module)
        super().finalize_early(module)

    def _forget(self, module: "WeightModule") -> None:
        if self.lifecycle.via in RELOADS and any(module.live(name) is not None for name in module.weights):
            for name in vars(module).keys() & TRANSFORMED:
                setattr(module, name, None)

    def post_process(self, path: str, module: "WeightModule") -> None:
        super().post_process(path, module)
        if self.lifecycle.via == "per_expert":  # no loaded layout comes, of which it could be built
            for name in vars(module).keys() & TRANSFORMED:
                setattr(module, name, tuple(tensor.clone() for tensor in getattr(module, name)))
        kernel = vars(module).get("kernel")
        if self.lifecycle.via in RELOADS and hasattr(kernel, "gemm1_alpha"):
            rebuilt = copy.copy(kernel)
            for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
                setattr(rebuilt, name, getattr(kernel, name).clone())
            vars(module)["kernel"] = rebuilt
