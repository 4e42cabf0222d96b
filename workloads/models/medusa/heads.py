"""Medusa heads (Cai et al., 2024): from one hidden state, each head guesses a token one place further ahead."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.kernels.activations import sigmoid
from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import linear_partial, round_to_bf16
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.batch import Batch
from workloads.models.layers import ParallelLMHead, ReplicatedLinear, Rows
from workloads.models.medusa.config import MedusaConfig
from workloads.models.medusa.tensors import PREFIX
from workloads.models.served import Cache, Drafter, Setting


class ResidualBlock(nn.Module):
    """x + silu(W x), layer after layer; each sum is rounded once. Whole on every rank."""

    def __init__(self, config: MedusaConfig, prefix: str) -> None:
        super().__init__()
        width = config.hidden_size
        self.layers = nn.ModuleList(
            ReplicatedLinear(width, [Rows(f"{prefix}layers.{layer}.weight", width)])
            for layer in range(config.num_draft_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [n, hidden] -> BF16 [n, hidden]."""
        return by_rows(self._rows, x) if len(x) else x

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inner = linear_partial(x, layer.get_parameter("weight"))
            x = round_to_bf16(x.to(torch.float64) + inner * sigmoid(inner))
        return x


class TokenMap(WeightModule):
    """`token_map` int64 [draft vocabulary]: the target's id of each token that the heads can propose."""

    token_map: torch.Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.vocab = config.vocab_size
        size = (config.draft_vocab_size,)
        placement = Placement(f"{PREFIX}token_map", whole(size), whole(size), whole(size))
        self.add_weight("token_map", Weight(size, torch.int64, (placement,), below=config.vocab_size))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """FP32 [R, draft vocabulary] -> FP32 [R, vocabulary], minus infinity for what cannot be proposed."""
        spread = logits.new_full((len(logits), self.vocab), -torch.inf)
        spread[:, self.token_map] = logits
        return spread


class MedusaHeads(Drafter):
    """All heads. The engine asks for one proposal, which is head 0's; `head_logits` asks any of them."""

    def __init__(self, setting: Setting[MedusaConfig]) -> None:
        super().__init__()
        config, group = setting.config, setting.groups.tp
        self.blocks = nn.ModuleList(
            ResidualBlock(config, f"{PREFIX}blocks.{head}.") for head in range(config.num_draft_heads)
        )
        self.lm_heads = nn.ModuleList(
            ParallelLMHead(
                group, config.draft_vocab_size, config.hidden_size, f"{PREFIX}lm_heads.{head}.weight"
            )
            for head in range(config.output_heads)
        )
        reduced = config.draft_vocab_size < config.vocab_size
        self.token_map = TokenMap(config) if reduced else nn.Identity()

    def make_caches(self, slots: int, positions: int) -> list[Cache]:
        """None: a proposal follows from one hidden state."""
        return []

    def forward(self, batch: Batch, hidden: torch.Tensor, caches: Sequence[Cache]) -> torch.Tensor:
        """Returns BF16 [n, heads, hidden] for `logits`."""
        return torch.stack([block(hidden) for block in self.blocks], dim=1)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.head_logits(0, hidden, rows, batch)

    def head_logits(self, head: int, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`logits` of head `head`, for the token head + 2 places after each row's."""
        output = self.lm_heads[min(head, len(self.lm_heads) - 1)]
        logits: torch.Tensor = self.token_map(output(hidden[:, head], rows, batch.share))
        return logits
