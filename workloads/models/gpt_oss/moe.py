"""Mixture of experts of one layer: the router, and this rank's part of the experts in their kernel's layout."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import pad

from workloads.kernels.linear import linear_partial, round_to_bf16
from workloads.kernels.routing import route_softmax
from workloads.kernels.shuffled_moe import ExpertQuantization, ShuffledMoE
from workloads.kernels.shuffled_moe_layout import (
    shuffle_rows,
    shuffle_scale,
    unshuffle_rows,
    unshuffle_scale,
)
from workloads.loading.tensor_table import MXFP4_GROUP
from workloads.loading.weights import Placement, Region, Weight, WeightModule, whole
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.models.gpt_oss.tensors import NAMING
from workloads.models.layers import vector
from workloads.models.parallel import Group, RankGroups, all_gather_rows, largest, reduce_scatter_rows

VALUES = {"weight": (2,), "scale": (MXFP4_GROUP,)}  # of a row, in one byte of a piece
UNIT_SCALE = 1.0  # scales are created as torch.ones(uint8), which is the byte 1 and not the scale 1
SUFFIX = {"weight": "_weight", "scale": "_weight_scale", "bias": "_bias"}


class RoutedExperts(WeightModule):
    """MXFP4 experts of this rank: whole ones with expert parallelism, else whole blocks of each one's intermediate
    size.

    `w13_weight` U8 [E, 2I, H/2], `w13_weight_scale` U8 [E, 2I, H/32], `w13_bias` BF16 [E, 2I], of which gate and up
    rows alternate; `w2_weight` U8 [E, H, I/2], `w2_weight_scale` U8 [E, H, I/32], `w2_bias` BF16 [E, H]. H and I are
    padded to multiples of `expert_alignment`. Post-processing brings each parameter, padding included, into the
    kernel's layout in place, so that what a later load leaves of it is no padding any more.
    """

    def __init__(self, config: GptOssConfig, groups: RankGroups, prefix: str) -> None:
        super().__init__()
        self.is_expert_parallel = groups.ep.size > 1
        self.group = groups.ep if self.is_expert_parallel else groups.tp
        self.first, count = groups.ep.share(config.num_experts, "num_experts")
        tp = Group() if self.is_expert_parallel else groups.tp
        inner = config.intermediate_share(tp.rank, tp.size)
        for name, weight in _expert_weights(config, (self.first, count), inner, prefix).items():
            self.add_weight(name, weight)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.kernel = self.make_kernel()

    def make_kernel(self) -> ShuffledMoE:
        """On the parameters as they are registered now. Called once: a kernel that is made anew after a load has new
        constants, and refers to what the load works on."""
        names = ("w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
        quantization = ExpertQuantization(*(self.get_parameter(name) for name in names))
        return ShuffledMoE(quantization, self.alpha, self.limit)

    def post_process(self) -> None:
        for name in self.weights:
            parameter, pairs = self.get_parameter(name), name.startswith("w13")
            shuffle = shuffle_scale if name.endswith("scale") else shuffle_rows
            parameter.copy_(shuffle(parameter, pairs))

    def as_loaded(self, name: str, live: torch.Tensor) -> torch.Tensor:
        unshuffle = unshuffle_scale if name.endswith("scale") else unshuffle_rows
        return unshuffle(live.detach(), name.startswith("w13"))

    def forward(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """x BF16 [n, hidden], this rank's tokens; topk_idx int64 and topk_weights FP32 [n, K] -> BF16 [n, hidden],
        rounded once. Every rank sees the tokens of all and adds its part. Collective over the group that shares the
        experts, in which ranks may have different numbers of tokens."""
        count = largest(self.group, len(x))
        if not count:
            return x
        tokens, idx, weights = (
            all_gather_rows(self.group, pad(rows, (0, 0, 0, count - len(x))))  # weights of padding are zero
            for rows in (x, topk_idx, topk_weights)
        )
        adds_bias = self.is_expert_parallel or self.group.rank == 0
        packed = self.get_parameter("w13_weight"), self.get_parameter("w2_weight")
        partial = self.kernel.forward(tokens, idx - self.first, weights, *packed, adds_bias)
        return round_to_bf16(reduce_scatter_rows(self.group, partial.contiguous())[: len(x)])


class Router(WeightModule):
    """`weight` BF16 [experts, hidden], `bias` BF16 [experts]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, config: GptOssConfig, prefix: str) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        shape = (config.num_experts, config.hidden_size)
        placement = Placement(f"{prefix}weight", whole(shape), whole(shape), whole(shape))
        self.add_weight("weight", Weight(shape, torch.bfloat16, (placement,)))
        self.add_weight("bias", vector(f"{prefix}bias", config.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 [n, hidden] -> (topk_idx int64 [n, K], topk_weights FP32 [n, K])."""
        return route_softmax(linear_partial(x, self.weight) + self.bias, self.top_k)


class MixtureOfExperts(nn.Module):
    """Router and experts of one layer; every rank holds the router whole."""

    def __init__(self, config: GptOssConfig, groups: RankGroups, prefix: str) -> None:
        super().__init__()
        self.router = Router(config, f"{prefix}router.")
        self.experts = RoutedExperts(config, groups, f"{prefix}experts.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [n, hidden], this rank's tokens -> BF16 [n, hidden]. Collective."""
        out: torch.Tensor = self.experts(x, *self.router(x))
        return out


def _expert_weights(
    config: GptOssConfig, experts: tuple[int, int], inner: tuple[int, int], prefix: str
) -> dict[str, Weight]:
    """The six stacked parameters of experts (first, count) with (start, length) of their intermediate size."""
    hidden, (start, length) = config.hidden_size, inner
    padded_hidden, padded = config.padded(hidden), config.padded(length)
    gate_up = _Matrix("w13", "gate_up_proj", (2 * start, 2 * length), 2 * padded, (0, hidden), padded_hidden)
    down = _Matrix("w2", "down_proj", (0, hidden), padded_hidden, (start, length), padded)
    return {
        f"{matrix.parameter}{SUFFIX[piece]}": matrix.weight(config, piece, experts, prefix)
        for matrix in (gate_up, down)
        for piece in ("weight", "scale", "bias")
    }


@dataclass(frozen=True)
class _Matrix:
    """One of an expert's two matrices, as a rank holds it. rows, columns: (start, length) that it takes of the
    checkpoint's; padded_rows, padded_columns: lengths in the parameter."""

    parameter: str
    source: str
    rows: tuple[int, int]
    padded_rows: int
    columns: tuple[int, int]
    padded_columns: int

    def weight(self, config: GptOssConfig, piece: str, experts: tuple[int, int], prefix: str) -> Weight:
        """The parameter that stacks one piece of all experts (first, count)."""
        first, count = experts
        name = NAMING[config.checkpoint_layout].name
        if config.checkpoint_layout == "combined":
            source = prefix + name(self.source, piece)
            placements = [self._placement(piece, source, (0, count), (experts,))]
        else:
            sources = [prefix + name(self.source, piece, first + i) for i in range(count)]
            placements = [self._placement(piece, source, (i, 1), ()) for i, source in enumerate(sources)]
        shape = (count, self.padded_rows, *(length for _, length in _units(piece, (0, self.padded_columns))))
        dtype = torch.bfloat16 if piece == "bias" else torch.uint8
        return Weight(shape, dtype, tuple(placements), UNIT_SCALE if piece == "scale" else 0.0)

    def _placement(self, piece: str, source: str, place: tuple[int, int], stack: Region) -> Placement:
        """place: (start, length) among the parameter's experts. stack: the same in a tensor of all."""
        columns = _units(piece, self.columns)
        if piece == "weight" and stack:  # a dimension of blocks, then one of their bytes
            columns = (*_units("scale", self.columns), (0, MXFP4_GROUP // 2))
        return Placement(
            source,
            source_region=(*stack, self.rows, *columns),
            target=(place, (0, self.rows[1]), *_units(piece, (0, self.columns[1]))),
            slot=(place, (0, self.padded_rows), *_units(piece, (0, self.padded_columns))),
            stacked=True,
        )


def _units(piece: str, columns: tuple[int, int]) -> Region:
    """(start, length) of columns in the entries of a piece: bytes of two values, scales of 32; a bias has none."""
    return tuple((columns[0] // n, columns[1] // n) for n in VALUES.get(piece, ()))
