"""What a family's models are built from, and what the engine asks of them when they serve."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from workloads.kernels.moe import MoEKernel
from workloads.kernels.sampling import greedy
from workloads.loading.weights import ModelRoot, Rule
from workloads.models.architectures import stack_module
from workloads.models.batch import Batch
from workloads.models.parallel import RankGroups

Config = TypeVar("Config")
Cache = Any  # of one layer: a dataclass whose fields are tensors, one slot of each for every request


@dataclass(frozen=True)
class Setting(Generic[Config]):
    """What every layer of a model is built from. fused: the kernel consumes the experts into its own layout.
    vocabulary: gives the text of each token id; nothing where there is no tokenizer. redundant_experts: slots of a
    layer for second copies of its experts."""

    config: Config
    groups: RankGroups
    kernel: MoEKernel
    fused: bool
    vocabulary: Callable[[], Sequence[str]] = tuple
    redundant_experts: int = 0


class Served(ModelRoot, ABC):
    """A model that is loaded as a root and runs batches."""

    @abstractmethod
    def make_caches(self, slots: int, positions: int) -> list[Cache]:
        """One cache a layer, for `slots` requests of at most `positions` tokens."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group. Collective. Of the last
        pipeline stage only.

        hidden: what `forward` returned.
        """


class Target(Served):
    """The model that answers."""

    @abstractmethod
    def forward(self, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        """Final hidden states of this rank's tokens, [n, ...], which `logits` and a drafter read. Collective.

        A pipeline stage takes over from the one before and hands on to the next; what one that is not the last
        returns is of no use.
        """


class Drafter(Served):
    """A model that proposes the tokens after the next one, loaded as a root of its own."""

    @abstractmethod
    def forward(self, batch: Batch, hidden: torch.Tensor, caches: Sequence[Cache]) -> torch.Tensor:
        """batch: the target's, with every token replaced by the one after it. hidden: what the target returned.
        Returns what `proposals` reads, [n, ...]. Collective."""

    def proposals(
        self, drafted: torch.Tensor, rows: torch.Tensor, batch: Batch, caches: Sequence[Cache]
    ) -> list[list[int]]:
        """Tokens to follow those of the batch's rows int64 [R], in order; of each row the likeliest. Collective, in
        every pass, with rows or without.

        drafted, batch: what `forward` returned and was given.
        """
        return greedy(self.logits(drafted, rows, batch)).unsqueeze(1).tolist() if len(rows) else []


class Stack(Protocol):
    """`stack` of a family."""

    RULES: Sequence[Rule]

    def make_roots(self, setting: Setting[Any]) -> Mapping[str, Target | Drafter]:
        """`target` and, where the dimensions have one, `draft`, which the last pipeline stage has alone."""


def model_stack(architecture: str) -> Stack:
    return cast(Stack, stack_module(architecture))
