"""The shared expert that MegaMoE computes beside the routed ones: FP8 weights in the fused layout, and its numerics.

Its weights come with one UE8M0 scale for each row and 32 columns, which is what the scales of a checkpoint's blocks
become when they are repeated. The layout is that of the routed experts (`mega_moe_layout`): gate and up rows alternate
in runs of 8, scales are packed four to an int32, MN-major and transposed within blocks of 128 rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workloads.kernels import mega_moe_layout as layout
from workloads.kernels.activations import GatedActivation
from workloads.kernels.blocks import by_rows
from workloads.kernels.quantization import dequantize_fp8_rows, quantize_fp8_rows


class SharedWeights(NamedTuple):
    """Fused (MegaMoE): float8_e4m3fn [2I, H], int32 [2I, H/128] MN-major, float8_e4m3fn [H, I] (alias of the loaded
    w2), int32 [H, I/128] MN-major. Loaded layout: float8_e4m3fn [2I, H] with gate rows above up rows, uint8 [2I, H/32],
    float8_e4m3fn [H, I], uint8 [H, I/32].
    """

    l1_weight: Tensor
    l1_scale: Tensor
    l2_weight: Tensor
    l2_scale: Tensor


def fuse_shared(loaded: SharedWeights, into: SharedWeights | None = None) -> SharedWeights:
    """The loaded layout in the fused one. With `into`, bytes are copied into that storage and it is returned.

    ValueError for sizes that the layout cannot take, or that are not those of `into`.
    """
    rows, hidden = loaded.l1_weight.shape
    layout.check_alignment(hidden, rows // 2, layout.LAYOUT_MULTIPLE)
    if into is None:
        device = loaded.l1_weight.device
        into = SharedWeights(
            torch.empty_like(loaded.l1_weight),
            layout.empty_scale(1, rows, hidden, device)[0],
            loaded.l2_weight,
            layout.empty_scale(1, hidden, rows // 2, device)[0],
        )
    if into.l2_weight.shape != loaded.l2_weight.shape:
        raise ValueError(
            f"The shared expert's w2 has shape {tuple(loaded.l2_weight.shape)}, but its storage has "
            f"{tuple(into.l2_weight.shape)}: an update in place needs the dimensions of the first load."
        )
    layout.fuse_l1_weight(_one(loaded.l1_weight), _one(into.l1_weight))
    layout.fuse_l1_scale(_one(loaded.l1_scale), into.l1_scale.unsqueeze(0))
    into.l2_weight.copy_(loaded.l2_weight)  # onto itself where it still is the alias
    layout.fuse_l2_scale(_one(loaded.l2_scale), into.l2_scale.unsqueeze(0))
    return into


def unfuse_shared(fused: SharedWeights) -> SharedWeights:
    """The inverse of `fuse_shared`; l2_weight is an alias."""
    return SharedWeights(
        layout.unfuse_l1_weight(_one(fused.l1_weight))[0].view(torch.float8_e4m3fn),
        layout.unfuse_l1_scale(fused.l1_scale.unsqueeze(0))[0],
        fused.l2_weight,
        layout.unfuse_l2_scale(fused.l2_scale.unsqueeze(0))[0],
    )


def shared_rows(q: Tensor, scales: Tensor, loaded: SharedWeights, activation: GatedActivation) -> Tensor:
    """The shared expert's output of every token, to be added in its own slot without a weight: BF16 [T, H].

    q float8_e4m3fn [T, H] and scales uint8 [T, H/32]: the rows that are dispatched to the routed experts. As theirs,
    gate and up are rounded to BF16, the activation to FP8 per 32 columns, the result to BF16.
    """
    w13 = dequantize_fp8_rows(loaded.l1_weight, loaded.l1_scale).t()
    w2 = dequantize_fp8_rows(loaded.l2_weight, loaded.l2_scale).t()

    def computed(x: Tensor) -> Tensor:
        gate, up = (x @ w13).to(torch.bfloat16).to(torch.float64).chunk(2, dim=-1)
        hidden = dequantize_fp8_rows(*quantize_fp8_rows(activation(gate, up)))
        return (hidden @ w2).to(torch.bfloat16)

    return by_rows(computed, dequantize_fp8_rows(q, scales))


def _one(matrix: Tensor) -> Tensor:
    """A matrix of bytes as that of a single expert."""
    return matrix.view(torch.uint8).unsqueeze(0)
