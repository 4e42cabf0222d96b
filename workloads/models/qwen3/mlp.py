"""What follows attention: a dense MLP divided over tensor-parallel ranks, or routed experts."""

from collections.abc import Callable

import torch
from torch import nn

from workloads.kernels.activations import SwigluParameters
from workloads.kernels.linear import linear_partial, round_to_bf16
from workloads.kernels.routing import route_softmax
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.parallel import ALONE, Group, RankGroups, all_gather_rows, reduce_scatter_rows
from workloads.models.qwen3.config import Qwen3Config
from workloads.models.qwen3.formats import FORMATS
from workloads.models.qwen3.matrices import MATRICES, FusedMatrices, Piece

_SILU = SwigluParameters()


def gate_up(stem: str, hidden: int, start: int, length: int, padded: int) -> list[Piece]:
    """Both input projections of an MLP, of which this rank has some rows."""
    slot = (padded, hidden)
    return [Piece(f"{stem}{name}_proj", (start, length), (0, hidden), slot) for name in ("gate", "up")]


def down(stem: str, hidden: int, start: int, length: int, padded: int) -> list[Piece]:
    """Its output projection, of which this rank has the columns of the same numbers."""
    return [Piece(f"{stem}down_proj", (0, hidden), (start, length), (hidden, padded))]


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of float64 products, each rounded to BF16 before and the result after."""
    rounded = (round_to_bf16(part).to(torch.float64) for part in (gate, up))
    return round_to_bf16(_SILU(*rounded))


def over_group(
    group: Group, x: torch.Tensor, capacity: int, sharded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run what is divided over the group on the tokens of all its ranks, which may have different numbers of them.
    Collective over the group.

    x: BF16 [n, H], this rank's tokens. capacity: most tokens of any rank of the group. sharded: from BF16
    [size*capacity, H], filled up with zeros, to this rank's part of a sum, float64 [size*capacity, O]. Returns this
    rank's rows of the sum, BF16 [n, O] rounded once.
    """
    if not capacity:
        return x
    filled = torch.cat([x, x.new_zeros(capacity - len(x), x.shape[1])])
    partial = sharded(all_gather_rows(group, filled))
    return round_to_bf16(reduce_scatter_rows(group, partial)[: len(x)])


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), each rank with some of the intermediate channels."""

    def __init__(self, config: Qwen3Config, group: Group, prefix: str) -> None:
        super().__init__()
        self.group = group
        form, matrices = FORMATS[config.quantization], MATRICES[config.quantization]
        share = form.share(config.intermediate_size, group.rank, group.size, aligned=False)
        self.gate_up_proj = matrices([gate_up(prefix, config.hidden_size, *share)])
        self.down_proj = matrices([down(prefix, config.hidden_size, *share)])

    def forward(self, x: torch.Tensor, capacity: int) -> torch.Tensor:
        """BF16 [n, hidden], this rank's tokens -> BF16 [n, hidden]; see `over_group`."""
        return over_group(self.group, x, capacity, self._partial)

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj.product(x).chunk(2, dim=-1)
        return self.down_proj.product(gated(gate, up))


class Router(WeightModule):
    """`weight` BF16 [experts, hidden], on every rank."""

    weight: torch.Tensor

    def __init__(self, config: Qwen3Config, prefix: str) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        shape = (config.num_experts, config.hidden_size)
        region = whole(shape)
        placement = Placement(f"{prefix}weight", region, region, region)
        self.add_weight("weight", Weight(shape, torch.bfloat16, (placement,)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 [T, hidden] -> topk_idx int64 [T, K], topk_weights FP32 [T, K]."""
        return route_softmax(linear_partial(x, self.weight), self.top_k)


class RoutedExperts(nn.Module):
    """Experts of this rank, `w13` and `w2` stacked: whole ones of its EP group or, without expert parallelism, all
    experts with this TP rank's share of their intermediate channels."""

    def __init__(self, config: Qwen3Config, groups: RankGroups, prefix: str) -> None:
        super().__init__()
        form, matrices = FORMATS[config.quantization], MATRICES[config.quantization]
        self.first, self.count = groups.ep.share(config.num_experts, "num_experts")
        divided = groups.tp if groups.ep.size == 1 else ALONE
        share = form.share(config.moe_intermediate_size, divided.rank, divided.size)
        stems = [f"{prefix}{expert}." for expert in range(self.first, self.first + self.count)]
        hidden = config.hidden_size
        w13 = [gate_up(stem, hidden, *share) for stem in stems]
        self.w13: FusedMatrices = matrices(w13, stacked=True, swapped=True)
        self.w2: FusedMatrices = matrices([down(stem, hidden, *share) for stem in stems], stacked=True)

    def forward(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """x BF16 [T, hidden], topk_idx int64 [T, K] of all experts, topk_weights FP32 [T, K] -> this rank's part of the
        weighted sum, float64 [T, hidden]."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in range(self.count):
            rows, slots = torch.nonzero(topk_idx == self.first + expert, as_tuple=True)
            if not len(rows):
                continue
            up, gate = self.w13.product(x[rows], expert).chunk(2, dim=-1)
            weights = topk_weights[rows, slots].to(torch.float64).unsqueeze(1)
            out[rows] += self.w2.product(gated(gate, up), expert) * weights  # a token has an expert once
        return out


class SparseMoE(nn.Module):
    """The router and the experts it chooses from, for the tokens of the whole EP group, or of the TP group where there
    is no expert parallelism: each rank computes what its experts, or its shares of them, give to all those tokens."""

    def __init__(self, config: Qwen3Config, groups: RankGroups, prefix: str) -> None:
        super().__init__()
        self.group = groups.ep if groups.ep.size > 1 else groups.tp
        self.gate = Router(config, f"{prefix}gate.")
        self.experts = RoutedExperts(config, groups, f"{prefix}experts.")

    def forward(self, x: torch.Tensor, capacity: int) -> torch.Tensor:
        """BF16 [n, hidden], this rank's tokens -> BF16 [n, hidden]; see `over_group`."""
        return over_group(self.group, x, capacity, self._partial)

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        partial: torch.Tensor = self.experts(x, *self.gate(x))
        return partial
