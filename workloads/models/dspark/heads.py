"""Heads of a DSpark drafter beside the target's output head: dependence within a block, and confidence."""

import torch
from torch import nn

from workloads.kernels.activations import sigmoid
from workloads.kernels.linear import linear_partial
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.layers import ReplicatedLinear, Rows


class MarkovEmbedding(WeightModule):
    """`weight` BF16 [vocab, rank], whole on every rank: a row for the token before."""

    weight: torch.Tensor

    def __init__(self, vocab: int, rank: int, source: str) -> None:
        super().__init__()
        region = whole((vocab, rank))
        placement = Placement(source, region, region, region)
        self.add_weight("weight", Weight((vocab, rank), torch.bfloat16, (placement,)))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [R] -> BF16 [R, rank]."""
        return self.weight[token_ids]


class MarkovHead(nn.Module):
    """What the token before adds to the logits of the next: w2 (w1 of the token before), of low rank."""

    def __init__(
        self, vocab: int, rank: int, prefix: str, names: tuple[str, str] = ("markov_w1", "markov_w2")
    ) -> None:
        """names: of both in the checkpoint."""
        super().__init__()
        first, second = names
        self.markov_w1 = MarkovEmbedding(vocab, rank, f"{prefix}{first}.weight")
        self.markov_w2 = ReplicatedLinear(rank, [Rows(f"{prefix}{second}.weight", vocab)])

    def bias(self, embedded: torch.Tensor) -> torch.Tensor:
        """BF16 [R, rank], from `markov_w1` -> FP32 [R, vocab] that holds BF16 values."""
        out: torch.Tensor = self.markov_w2(embedded)
        return out.to(torch.float32)


class ConfidenceHead(nn.Module):
    """How likely the target takes a proposal: sigmoid of one row over its hidden state and the token before."""

    def __init__(self, hidden: int, rank: int, prefix: str) -> None:
        super().__init__()
        self.proj = ReplicatedLinear(hidden + rank, [Rows(f"{prefix}proj.weight", 1)])

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """BF16 [R, hidden], BF16 [R, rank] -> float64 [R]."""
        return sigmoid(linear_partial(torch.cat([hidden, embedded], dim=-1), self.proj.weight).squeeze(-1))
