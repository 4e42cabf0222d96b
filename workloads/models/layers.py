"""Layers that models share: linear layers and embeddings by how they are divided over ranks, norms, the gated MLP.

Each declares its parameters with the checkpoint tensors they come from, and holds this rank's share only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workloads.kernels.activations import GatedActivation
from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import linear, linear_partial, round_to_bf16
from workloads.kernels.norm import rms_norm
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.batch import Batch
from workloads.models.online_fp8 import Matrix
from workloads.models.parallel import (
    ALONE,
    Group,
    all_gather_columns,
    all_gather_rows,
    gather_selected,
    reduce_scatter_rows,
    scatter_selected,
)


@dataclass(frozen=True)
class Rows:
    """The rows of one checkpoint tensor within a fused weight: this rank's share of them, or all."""

    source: str
    count: int
    sharded: bool = True


def over_all_tokens(
    group: Group, batch: Batch, x: torch.Tensor, sharded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run layers that are divided over the group on every token of the batch. Collective.

    x: BF16 [n, H], this rank's tokens. sharded: from BF16 [T, H], the tokens of all ranks, to this rank's part of a
    sum, float64 [T, O]. Returns this rank's rows of the sum, BF16 [n, O] rounded once.
    """
    if not batch.tokens:  # so on every rank of the group
        return x
    return share_of_sum(group, batch, sharded(all_tokens(group, batch, x)))


def share_of_sum(group: Group, batch: Batch, partial: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over ranks of partial float64 [T, O], all tokens of the batch: BF16 [n, O], rounded
    once. Collective unless the batch is empty."""
    if not batch.tokens:
        return round_to_bf16(partial)
    summed = reduce_scatter_rows(group, _padded(partial, batch.share * group.size))
    return round_to_bf16(summed[: batch.local_tokens])


def all_tokens(group: Group, batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """BF16 [n, H], this rank's tokens -> BF16 [T, H], those of all ranks. Collective unless there are none."""
    return all_gather_rows(group, _padded(x, batch.share))[: batch.tokens] if batch.tokens else x


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`rows` with zeros below, `count` in all."""
    missing = count - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def vector(source: str, size: int, dtype: torch.dtype = torch.bfloat16, start: int = 0) -> Weight:
    """A weight [size] taken from `start` of a checkpoint vector, which may be longer."""
    region = ((start, size),)
    return Weight((size,), dtype, (Placement(source, region, whole((size,)), whole((size,))),))


class ColumnParallelLinear(Matrix):
    """Several checkpoint matrices fused row under row; each rank has a share of the rows of each.

    `weight` BF16 [rows, in_features]. Rows are padded with zeros at the end to a multiple of `multiple`; the
    padding belongs to the slot of the last matrix. `sizes`: rows of each matrix here, then of the padding.
    """

    def __init__(self, group: Group, in_features: int, rows: Sequence[Rows], multiple: int = 1) -> None:
        super().__init__()
        shares = [group.share(r.count, f"Rows of {r.source}") if r.sharded else (0, r.count) for r in rows]
        used = sum(length for _, length in shares)
        total = -(-used // multiple) * multiple
        placements = []
        start = 0
        for piece, (first, length) in zip(rows, shares, strict=True):
            slot = length + (total - used if piece is rows[-1] else 0)
            columns = (0, in_features)
            placements.append(
                Placement(
                    piece.source,
                    source_region=((first, length), columns),
                    target=((start, length), columns),
                    slot=((start, slot), columns),
                )
            )
            start += length
        self.sizes = [length for _, length in shares] + [total - used]
        padded = 0.0 if total > used else None
        self.add_weight(
            "weight", Weight((total, in_features), torch.bfloat16, tuple(placements), creation_value=padded)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, in_features] -> BF16 [T, rows]."""
        if not len(x):
            return x.new_empty(0, sum(self.sizes))
        return linear(x, self.matrix())

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`forward`, divided into the results of the fused matrices, padding last."""
        return torch.split(self(x), self.sizes, dim=-1)


class ReplicatedLinear(ColumnParallelLinear):
    """Fused matrices that every rank holds whole."""

    def __init__(self, in_features: int, rows: Sequence[Rows]) -> None:
        super().__init__(ALONE, in_features, rows)


class RowParallelLinear(Matrix):
    """A matrix divided along its inputs. `weight` BF16 [out_features, in_features / ranks]."""

    def __init__(self, group: Group, in_features: int, out_features: int, source: str) -> None:
        super().__init__()
        first, length = group.share(in_features, f"Columns of {source}")
        shape = (out_features, length)
        placement = Placement(source, ((0, out_features), (first, length)), whole(shape), whole(shape))
        self.add_weight("weight", Weight(shape, torch.bfloat16, (placement,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, in_features / ranks] -> this rank's part of the sum, float64 [T, out_features]."""
        return linear_partial(x, self.matrix())


class RMSNorm(WeightModule):
    """Root-mean-square norm over the last dimension; `weight` [size]."""

    weight: torch.Tensor

    def __init__(self, size: int, eps: float, source: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.eps = eps
        self.add_weight("weight", vector(source, size, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps) if len(x) else x


def _vocabulary_share(group: Group, vocab: int, hidden: int, source: str) -> Weight:
    first, length = group.share(vocab, f"Vocabulary of {source}")
    shape = (length, hidden)
    placement = Placement(source, ((first, length), (0, hidden)), whole(shape), whole(shape))
    return Weight(shape, torch.bfloat16, (placement,))


class VocabParallelEmbedding(WeightModule):
    """Embedding divided over the vocabulary. `weight` BF16 [vocab / ranks, hidden]."""

    weight: torch.Tensor

    def __init__(self, group: Group, vocab: int, hidden: int, source: str) -> None:
        super().__init__()
        self.group = group
        self.add_weight("weight", _vocabulary_share(group, vocab, hidden, source))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [size*n], equal on all ranks -> embeddings of this rank's share, BF16 [n, hidden]. Collective."""
        length = self.weight.shape[0]
        owner = token_ids // length
        local = (token_ids - self.group.rank * length).clamp(0, length - 1)  # rows of others are not selected
        return scatter_selected(self.group, self.weight[local], owner)


class ParallelLMHead(WeightModule):
    """Output projection divided over the vocabulary. `weight` BF16 [vocab / ranks, hidden]."""

    weight: torch.Tensor

    def __init__(self, group: Group, vocab: int, hidden: int, source: str) -> None:
        super().__init__()
        self.group = group
        self.add_weight("weight", _vocabulary_share(group, vocab, hidden, source))

    def forward(self, hidden: torch.Tensor, rows: torch.Tensor, share: int) -> torch.Tensor:
        """Logits of some tokens of a batch. Collective unless there are no rows.

        hidden: BF16 [n, H], this rank's tokens. rows: int64 [R], of the whole batch; row i is with rank i // share.
        Returns float32 [R, vocab] that holds BF16 values, on every rank.
        """
        if self.group.size > 1:
            owner, row = rows // share, rows % share
            mine = owner == self.group.rank
            selected = hidden.new_zeros(len(rows), self.weight.shape[1])
            selected[mine] = hidden[row[mine]]
            selected = gather_selected(self.group, selected, owner)
        else:
            selected = hidden[rows]
        logits = linear(selected, self.weight)
        return all_gather_columns(self.group, logits).to(torch.float32)


class GatedMLP(nn.Module):
    """Gated MLP that every rank holds whole: down(activation(gate(x), up(x)))."""

    def __init__(self, hidden: int, intermediate: int, activation: GatedActivation, prefix: str) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = ReplicatedLinear(
            hidden,
            [
                Rows(f"{prefix}gate_proj.weight", intermediate),
                Rows(f"{prefix}up_proj.weight", intermediate),
            ],
        )
        self.down_proj = ReplicatedLinear(intermediate, [Rows(f"{prefix}down_proj.weight", hidden)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, hidden] -> BF16 [T, hidden]; the activation is computed in float64 and rounded once."""
        return by_rows(self._rows, x) if len(x) else x

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, _ = self.gate_up_proj.split(x)
        activated = self.activation(gate.to(torch.float64), up.to(torch.float64))
        out: torch.Tensor = self.down_proj(round_to_bf16(activated))
        return out
