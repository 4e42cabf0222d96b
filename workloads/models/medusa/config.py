"""Dimensions of a model with Medusa heads. Imports no torch: the planner reads them too."""

from dataclasses import dataclass

from workloads.models.dense.config import DenseConfig


@dataclass
class MedusaConfig(DenseConfig):
    """An ordinary target, and heads that each guess a token further ahead from its hidden state. Defaults: CPU proxy.

    draft_vocab_size: tokens that the heads can propose; below vocab_size the checkpoint has a token map that says
    which. tie_draft_heads: all heads share one output matrix.
    """

    num_draft_heads: int = 3
    num_draft_layers: int = 2  # of each head
    draft_vocab_size: int = 128
    tie_draft_heads: bool = False

    @property
    def output_heads(self) -> int:
        """Output matrices of the drafter."""
        return 1 if self.tie_draft_heads else self.num_draft_heads
