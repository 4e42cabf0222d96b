"""The routed experts' kernel: its interface and two CPU references of MegaMoE's numerics.

Both references compute what DeepGEMM's FP8xFP4 MegaMoE computes: rows quantised to FP8 per 32 columns, gate and up
rounded to BF16, the gated activation times the routing weight, FP8 again, the down projection rounded to BF16, a sum
over slots. They differ in where they read weights from: `MegaMoEReference` the fused layout, `LoadedLayoutReference`
the checkpoint's.

The GPU kernel accumulates in float32. Here products are summed in float64, where the sum is exact: x and w have at
most 18 and 4 significant bits below their block exponents, so K terms need 22 + log2(K) bits plus the spread of the
exponents within the row, and 53 are there (a spread of 2^19 at K = 3584). An exact sum does not depend on its
order, so neither batch shape nor sharding nor thread count can change a result.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.kernels import mega_moe_layout as layout
from workloads.kernels.activations import GatedActivation
from workloads.kernels.blocks import ROWS
from workloads.kernels.moe_dispatch import combine, dispatch
from workloads.kernels.quantization import dequantize_fp8_rows, dequantize_mxfp4, quantize_fp8_rows
from workloads.kernels.shared_expert import SharedWeights, fuse_shared, shared_rows, unfuse_shared

NAN_SCALE = 255  # of the bytes of E8M0


class ExpertWeights(NamedTuple):
    """The local experts' weights in the layout of one kernel; what `MoEKernel.prepare` made of them.

    Fused (MegaMoE): int8 [E, 2I, H/2], int32 [E, 2I, H/128] MN-major, int8 [E, H, I/2] (alias of the loaded w2),
    int32 [E, H, I/128] MN-major. Loaded layout: the four checkpoint tensors themselves.
    """

    l1_weight: Tensor
    l1_scale: Tensor
    l2_weight: Tensor
    l2_scale: Tensor


class MoEKernel(Protocol):
    """Routed experts with MXFP4 weights, expert-parallel over `group`.

    keeps_w2: what `prepare` makes of w2 is an alias of it, in its loaded layout. folded: of each expert of the last
    `prepare`, groups of weights whose exponent the layout could not hold; empty where it holds all. multiple: to which
    the intermediate size of experts must be padded.
    """

    keeps_w2: bool
    multiple: int
    folded: Sequence[int]

    def prepare(
        self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, into: ExpertWeights | None = None
    ) -> ExpertWeights:
        """Bring checkpoint tensors into the kernel's layout.

        w13 uint8 [E, 2I, H/2] (gate rows above up rows), w13_scale uint8 [E, 2I, H/32], w2 uint8 [E, H, I/2],
        w2_scale uint8 [E, H, I/32]; E local experts. With `into`, bytes are copied into that storage, every address
        is kept and `into` is returned. ValueError when shapes do not fit each other, `into` or the kernel.
        """
        ...

    def restore(self, weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inverse of `prepare`: (w13, w13_scale, w2, w2_scale); parts that `prepare` aliased are aliases."""
        ...

    def prepare_shared(self, loaded: SharedWeights, into: SharedWeights | None = None) -> SharedWeights:
        """Bring the shared expert from the loaded layout into the kernel's; `into` as in `prepare`."""
        ...

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
        """x bf16 [T, H], topk_idx int64 [T, K] global ids (-1 masked), topk_weights float32 [T, K] -> bf16 [T, H].

        shared: the expert that every token passes, from `prepare_shared`; it is added after the routed ones.
        Collective over `group` (None: this process holds all `num_experts`); T may be 0 and may differ by rank.
        """
        ...


class Recipe(NamedTuple):
    """How activations are rounded to E4M3 before each matrix.

    quantize(x [..., K]) -> (float8_e4m3fn [..., K], uint8 [..., K/32], the bytes of the scales, as they travel);
    dequantize takes both and gives float64. The hidden ones stand before the second matrix.
    """

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor], Tensor]
    quantize_hidden: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize_hidden: Callable[[Tensor, Tensor], Tensor]


MEGA_MOE_RECIPE = Recipe(quantize_fp8_rows, dequantize_fp8_rows, quantize_fp8_rows, dequantize_fp8_rows)


class MegaMoEReference:
    """CPU reference of DeepGEMM's MegaMoE, reading the fused layout."""

    keeps_w2 = True
    multiple = layout.LAYOUT_MULTIPLE
    folded: Sequence[int] = ()

    def prepare(
        self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, into: ExpertWeights | None = None
    ) -> ExpertWeights:
        experts, hidden, intermediate = check_shapes(w13, w13_scale, w2, w2_scale)
        layout.check_alignment(hidden, intermediate, layout.LAYOUT_MULTIPLE)
        if into is None:
            into = ExpertWeights(
                layout.empty_l1_weight(experts, hidden, intermediate, w13.device),
                layout.empty_scale(experts, 2 * intermediate, hidden, w13.device),
                layout.fuse_l2_weight(w2),
                layout.empty_scale(experts, hidden, intermediate, w2.device),
            )
        check_same_shape("l2_weight", w2, into.l2_weight)
        layout.fuse_l1_weight(w13, into.l1_weight)
        layout.fuse_l1_scale(w13_scale, into.l1_scale)
        layout.unfuse_l2_weight(into.l2_weight).copy_(w2)  # onto itself where w2 still is the alias
        layout.fuse_l2_scale(w2_scale, into.l2_scale)
        return into

    def restore(self, weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            layout.unfuse_l1_weight(weights.l1_weight),
            layout.unfuse_l1_scale(weights.l1_scale),
            layout.unfuse_l2_weight(weights.l2_weight),
            layout.unfuse_l2_scale(weights.l2_scale),
        )

    def prepare_shared(self, loaded: SharedWeights, into: SharedWeights | None = None) -> SharedWeights:
        return fuse_shared(loaded, into)

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
        def w13(e: int) -> Tensor:
            packed = layout.unfuse_l1_weight(weights.l1_weight[e : e + 1])
            return dequantize_mxfp4(packed[0], layout.unfuse_l1_scale(weights.l1_scale[e : e + 1])[0])

        def w2(e: int) -> Tensor:
            packed = layout.unfuse_l2_weight(weights.l2_weight[e])
            return dequantize_mxfp4(packed, layout.unfuse_l2_scale(weights.l2_scale[e : e + 1])[0])

        check_local_experts(weights, group, num_experts)
        loaded = None if shared is None else unfuse_shared(shared)
        return _forward(
            x, topk_idx, topk_weights, (w13, w2), group, num_experts, activation, loaded, MEGA_MOE_RECIPE
        )


class LoadedLayoutReference:
    """The same numerics on weights as the checkpoint lays them out; nothing is post-processed."""

    keeps_w2 = True
    multiple = layout.LAYOUT_MULTIPLE
    folded: Sequence[int] = ()
    recipe = MEGA_MOE_RECIPE

    def prepare(
        self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, into: ExpertWeights | None = None
    ) -> ExpertWeights:
        check_shapes(w13, w13_scale, w2, w2_scale)
        loaded = ExpertWeights(w13, w13_scale, w2, w2_scale)
        if into is None:
            return loaded
        for name, source, target in zip(ExpertWeights._fields, loaded, into, strict=True):
            check_same_shape(name, source, target)
            target.copy_(source)
        return into

    def restore(self, weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return weights.l1_weight, weights.l1_scale, weights.l2_weight, weights.l2_scale

    def prepare_shared(self, loaded: SharedWeights, into: SharedWeights | None = None) -> SharedWeights:
        if into is None:
            return loaded
        for name, source, target in zip(SharedWeights._fields, loaded, into, strict=True):
            check_same_shape(name, source, target)
            target.copy_(source)
        return into

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
        def w13(e: int) -> Tensor:
            return dequantize_mxfp4(weights.l1_weight[e], weights.l1_scale[e])

        def w2(e: int) -> Tensor:
            return dequantize_mxfp4(weights.l2_weight[e], weights.l2_scale[e])

        check_local_experts(weights, group, num_experts)
        return _forward(
            x, topk_idx, topk_weights, (w13, w2), group, num_experts, activation, shared, self.recipe
        )


def _forward(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    matrices: tuple[Callable[[int], Tensor], Callable[[int], Tensor]],
    group: dist.ProcessGroup | None,
    num_experts: int,
    activation: GatedActivation,
    shared: SharedWeights | None,
    recipe: Recipe,
) -> Tensor:
    """Dispatch, run the local experts that received rows, combine. matrices: w13 and w2 of a local expert in float64.
    shared: in the loaded layout.

    The routing weight enters before the second quantisation, as in MegaMoE's epilogue; weighting at the
    combine would round differently. float64 -> bf16 passes through float32, the type the kernel accumulates in.
    """
    q, scales = recipe.quantize(x)
    rows = dispatch(q, scales, topk_idx, topk_weights, num_experts, group)
    w13, w2 = (lru_cache(maxsize=1)(matrix) for matrix in matrices)  # an expert's blocks follow one another
    outputs = [x.new_empty((0, x.shape[1]), dtype=torch.bfloat16)]
    for part, counts in _tasks(rows.counts):
        gate_up = _per_expert(recipe.dequantize(rows.x[part], rows.x_scale[part]), w13, counts)
        gate, up = gate_up.to(torch.bfloat16).to(torch.float64).chunk(2, dim=-1)
        hidden = activation(gate, up) * rows.topk_weight[part].to(torch.float64).unsqueeze(-1)
        out = _per_expert(recipe.dequantize_hidden(*recipe.quantize_hidden(hidden)), w2, counts)
        outputs.append(out.to(torch.bfloat16))
    own = None if shared is None else shared_rows(*quantize_fp8_rows(x), shared, activation)
    return combine(torch.cat(outputs), rows.routes, own)


def _tasks(counts: list[int]) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """Row ranges to compute together, each with its (expert, rows) in order.

    For a few rows the number of operations is what costs, so that all experts' rows go together; many are computed
    expert by expert in blocks that stay in the cache.
    """
    busy = [(e, count) for e, count in enumerate(counts) if count]
    if 0 < sum(counts) <= ROWS:
        yield slice(0, sum(counts)), busy
        return
    start = 0
    for e, count in busy:
        for first in range(start, start + count, ROWS):
            last = min(first + ROWS, start + count)
            yield slice(first, last), [(e, last - first)]
        start += count


def _per_expert(rows: Tensor, matrix: Callable[[int], Tensor], counts: list[tuple[int, int]]) -> Tensor:
    """float64 [R, K], some rows of one expert after those of another -> float64 [R, N]."""
    parts = torch.split(rows, [count for _, count in counts])
    products = [part @ matrix(e).T for part, (e, _) in zip(parts, counts, strict=True)]
    return products[0] if len(products) == 1 else torch.cat(products)


def check_shapes(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> tuple[int, int, int]:
    """(E, H, I) of the four checkpoint tensors; ValueError unless they describe the same experts as uint8."""
    experts, hidden, intermediate = w13.shape[0], 2 * w13.shape[-1], w13.shape[1] // 2
    expected = {
        "w13": (w13, (experts, 2 * intermediate, hidden // 2)),
        "w13_scale": (w13_scale, (experts, 2 * intermediate, hidden // 32)),
        "w2": (w2, (experts, hidden, intermediate // 2)),
        "w2_scale": (w2_scale, (experts, hidden, intermediate // 32)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype != torch.uint8:
            raise ValueError(
                f"Expert tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, but w13 of shape {tuple(w13.shape)} "
                f"needs it as torch.uint8 {shape}: pass the MXFP4 bytes of one layer's local experts."
            )
    return experts, hidden, intermediate


def check_scale(name: str, scale: Tensor) -> None:
    """ValueError for a NaN among the exponent bytes uint8 [E, N, K/32] of a kernel's weights."""
    bad = (scale == NAN_SCALE).flatten(1).any(1)
    if bool(bad.any()):
        expert = int(bad.to(torch.uint8).argmax())
        raise ValueError(
            f"{name} holds the byte {NAN_SCALE}, a NaN, first for local expert {expert}: the checkpoint is damaged, "
            "exponent bytes were converted as numbers, or padding was not filled; MegaMoE reads no NaN among weights."
        )


def check_same_shape(name: str, source: Tensor, target: Tensor) -> None:
    """ValueError when an update does not fit the storage it must keep; copy_ alone would broadcast."""
    if source.shape != target.shape:
        raise ValueError(
            f"The update of {name} has shape {tuple(source.shape)}, but its storage has {tuple(target.shape)}: "
            "an update in place needs the dimensions and the sharding of the first load."
        )


def check_local_experts(weights: ExpertWeights, group: dist.ProcessGroup | None, num_experts: int) -> None:
    """ValueError unless this rank holds its equal share of `num_experts`."""
    ranks = 1 if group is None else dist.get_world_size(group)
    local = weights.l1_weight.shape[0]
    if local * ranks != num_experts:
        raise ValueError(
            f"This rank holds {local} experts and the group has {ranks} ranks, but num_experts is {num_experts}: "
            "every rank must hold num_experts / ranks of them."
        )
