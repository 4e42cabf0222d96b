"""MegaMoE on Hopper behind the interface of routed experts, and its reference in float64."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.kernels import mega_moe_hopper as hopper
from workloads.kernels import mega_moe_hopper_layout as layout
from workloads.kernels.activations import GatedActivation
from workloads.kernels.mega_moe_hopper_sizes import TILE, WEIGHT_BYTES, scale_bytes
from workloads.kernels.mega_moe_layout import check_alignment
from workloads.kernels.moe import (
    ExpertWeights,
    LoadedLayoutReference,
    Recipe,
    check_local_experts,
    check_same_shape,
    check_scale,
    check_shapes,
)
from workloads.kernels.moe_dispatch import combine, dispatch
from workloads.kernels.quantization import dequantize_fp8_groups, quantize_fp8_groups, quantize_fp8_rows
from workloads.kernels.shared_expert import SharedWeights, shared_rows

HIDDEN_GROUP = 64  # channels that share one scale between the matrices


class HopperMegaMoE:
    """MXFP4 experts on one Hopper GPU, or on several that exchange rows through `moe_dispatch`.

    A shared expert is computed beside the kernel, by torch in float64. folded: see `layout.Packed.out_of_range`.
    """

    keeps_w2 = False
    multiple = TILE

    def __init__(self) -> None:
        self.folded: Sequence[int] = ()

    def prepare(
        self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, into: ExpertWeights | None = None
    ) -> ExpertWeights:
        """As of `MoEKernel`; no part is an alias. ValueError for a NaN among the scales: the kernel has none."""
        _, hidden, intermediate = check_shapes(w13, w13_scale, w2, w2_scale)
        check_alignment(hidden, intermediate, TILE)
        for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
            check_scale(name, scale)
        if into is not None:
            _check_storage(into, len(w13), hidden, intermediate)
        held = (None, None) if into is None else (into[:2], into[2:])
        first = layout.pack(w13, w13_scale, gated=True, into=held[0])
        second = layout.pack(w2, w2_scale, gated=False, into=held[1])
        self.folded = (first.out_of_range + second.out_of_range).tolist()
        return ExpertWeights(first.weight, first.scale, second.weight, second.scale) if into is None else into

    def restore(self, weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            *layout.unpack(weights.l1_weight, weights.l1_scale, gated=True),
            *layout.unpack(weights.l2_weight, weights.l2_scale, gated=False),
        )

    def prepare_shared(self, loaded: SharedWeights, into: SharedWeights | None = None) -> SharedWeights:
        return LoadedLayoutReference().prepare_shared(loaded, into)

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        group: dist.ProcessGroup | None,
        num_experts: int,
        activation: GatedActivation,
        shared: SharedWeights | None = None,
    ) -> Tensor:
        """As of `MoEKernel`. Raises what `mega_moe_hopper.run` raises, before anything is launched."""
        check_local_experts(weights, group, num_experts)
        experts = hopper.Experts(*weights)
        if group is None and shared is None:
            hopper.check_ids(topk_idx, num_experts)
            tokens = hopper.Tokens(x.contiguous(), None, topk_idx.contiguous(), topk_weights.contiguous())
            return hopper.run(tokens, experts, activation)
        q, scales = HOPPER_RECIPE.quantize(x)
        rows = dispatch(q, scales, topk_idx, topk_weights, num_experts, group)
        local = torch.arange(len(rows.counts), device=x.device)
        arrived = hopper.Tokens(
            rows.x.contiguous(),
            rows.x_scale.contiguous().view(torch.float32),
            local.repeat_interleave(torch.tensor(rows.counts, device=x.device)).unsqueeze(1),
            rows.topk_weight.contiguous().unsqueeze(1),
        )
        out = hopper.run(arrived, experts, activation, combine=False)
        own = None if shared is None else shared_rows(*quantize_fp8_rows(x), shared, activation)
        return combine(out, rows.routes, own)


def _quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    q, scales = quantize_fp8_groups(x, group)
    return q, scales.view(torch.uint8)


def _dequantize(q: Tensor, scales: Tensor) -> Tensor:
    return dequantize_fp8_groups(q, scales.contiguous().view(torch.float32))


HOPPER_RECIPE = Recipe(
    quantize=lambda x: _quantize(x, TILE),
    dequantize=_dequantize,
    quantize_hidden=lambda x: _quantize(x, HIDDEN_GROUP),
    dequantize_hidden=_dequantize,
)


class HopperReference(LoadedLayoutReference):
    """The recipe of `mega_moe_hopper` in float64, on any device, on weights in the checkpoint's layout."""

    recipe = HOPPER_RECIPE

    def prepare(
        self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, into: ExpertWeights | None = None
    ) -> ExpertWeights:
        """Exponents out of the layout's range are those that the kernel takes instead."""
        folded = [layout.folded_exponents(*pair) for pair in ((w13, w13_scale), (w2, w2_scale))]
        return super().prepare(w13, folded[0], w2, folded[1], into)


def _check_storage(into: ExpertWeights, experts: int, hidden: int, inner: int) -> None:
    """ValueError, before anything is written, where an update does not fit the storage that it must keep."""
    shapes = (
        (experts, 2 * inner // TILE, hidden // TILE, WEIGHT_BYTES),
        (experts, 2 * inner // TILE, scale_bytes(hidden)),
        (experts, hidden // TILE, inner // TILE, WEIGHT_BYTES),
        (experts, hidden // TILE, scale_bytes(inner)),
    )
    for name, shape, target in zip(ExpertWeights._fields, shapes, into, strict=True):
        check_same_shape(name, torch.empty(shape, device="meta"), target)
