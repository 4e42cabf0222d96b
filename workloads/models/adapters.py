"""Linear layers wrapped for low-rank adapters (LoRA), as a server does that may be given some while it serves.

The wrapped layer hangs below its wrapper, so that the path of its parameters has a `base_layer` that no checkpoint
knows. What is loaded there follows from the declarations of the layer itself, whatever its path.
"""

import torch
from torch import nn

from workloads.loading.weights import ModelRoot, Rule
from workloads.models.qwen3.matrices import FusedMatrices

RULES = (
    Rule(
        "*.lora_?_stacked",
        "constant",
        "slot for an adapter, empty: none is given to the engine, from no checkpoint",
    ),
)


class WithAdapter(nn.Module):
    """`base_layer`, and one empty slot for an adapter of rank r: plain attributes `lora_a_stacked` BF16 [1, r, K] and
    `lora_b_stacked` BF16 [1, N, r], zeros. An empty slot adds nothing, so the results are those of the layer."""

    def __init__(self, base_layer: FusedMatrices, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = torch.zeros(1, rank, base_layer.in_features, dtype=torch.bfloat16)
        self.lora_b_stacked = torch.zeros(1, sum(base_layer.slots), rank, dtype=torch.bfloat16)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `FusedMatrices.product`."""
        return self.base_layer.product(x)


def wrap_linears(root: ModelRoot, rank: int) -> None:
    """Wrap every linear layer of a model, routed experts excepted."""
    linears = [
        (path, module)
        for path, module in root.weight_modules()
        if isinstance(module, FusedMatrices) and not module.stacked
    ]
    for path, module in linears:
        parent, _, name = path.rpartition(".")
        setattr(root.get_submodule(parent), name, WithAdapter(module, rank))
