"""An ordinary decoder: pre-norm layers of attention and a gated MLP, both divided over the TP group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from workloads.kernels.activations import SwigluParameters
from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.rope import rope_frequencies
from workloads.models.batch import Batch
from workloads.models.dense.attention import GroupedQueryAttention
from workloads.models.dense.config import DenseConfig
from workloads.models.kv_cache import KvCache
from workloads.models.layers import (
    ColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    RowParallelLinear,
    Rows,
    VocabParallelEmbedding,
    over_all_tokens,
)
from workloads.models.parallel import Group
from workloads.models.rotary import RotaryEmbedding
from workloads.models.served import Setting
from workloads.models.vision import LanguageModel

MakeAttention = Callable[[Any, Group, str], GroupedQueryAttention]  # of a config, a group, a prefix of names
SILU = SwigluParameters()  # without its clamp


class ParallelMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), divided over the group by inner channels."""

    def __init__(self, config: DenseConfig, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = [Rows(f"{prefix}{name}_proj.weight", inner) for name in ("gate", "up")]
        self.gate_up_proj = ColumnParallelLinear(group, hidden, rows)
        self.down_proj = RowParallelLinear(group, inner, hidden, f"{prefix}down_proj.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, hidden] -> this rank's part of the sum, float64 [T, hidden]. The activation is rounded once."""
        return by_rows(self._rows, x)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, _ = self.gate_up_proj.split(x)
        activated = round_to_bf16(SILU(gate.to(torch.float64), up.to(torch.float64)))
        partial: torch.Tensor = self.down_proj(activated)
        return partial


class DecoderLayer(nn.Module):
    def __init__(
        self, config: DenseConfig, group: Group, prefix: str, attention: MakeAttention = GroupedQueryAttention
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.tp = group
        self.input_layernorm = RMSNorm(hidden, eps, f"{prefix}input_layernorm.weight")
        self.self_attn = attention(config, group, f"{prefix}self_attn.")
        self.post_attention_layernorm = RMSNorm(hidden, eps, f"{prefix}post_attention_layernorm.weight")
        self.mlp = ParallelMLP(config, group, f"{prefix}mlp.")

    def forward(self, x: torch.Tensor, batch: Batch, cache: KvCache, angles: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, BF16 [n, hidden] -> BF16 [n, hidden]. Collective over the TP group."""
        x = x + over_all_tokens(
            self.tp, batch, self.input_layernorm(x), lambda rows: self.self_attn(rows, batch, cache, angles)
        )
        return x + over_all_tokens(self.tp, batch, self.post_attention_layernorm(x), self.mlp)


class DenseModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: DenseConfig, group: Group, prefix: str, attention: MakeAttention) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            group, config.vocab_size, config.hidden_size, f"{prefix}embed_tokens.weight"
        )
        self.rotary_emb = RotaryEmbedding(rope_frequencies(config.head_dim, config.rope_theta))
        self.layers = nn.ModuleList(
            DecoderLayer(config, group, f"{prefix}layers.{layer}.", attention)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, f"{prefix}norm.weight")

    def forward(self, x: torch.Tensor, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        angles = self.rotary_emb(batch.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, batch, cache, angles)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class DenseForCausalLM(LanguageModel):
    """The whole decoder with its head. prefix: of all its tensors in the checkpoint."""

    def __init__(
        self, setting: Setting[Any], prefix: str = "", attention: MakeAttention = GroupedQueryAttention
    ) -> None:
        super().__init__()
        config, group = setting.config, setting.groups.tp
        self.model = DenseModel(config, group, f"{prefix}model.", attention)
        self.lm_head = ParallelLMHead(group, config.vocab_size, config.hidden_size, f"{prefix}lm_head.weight")

    def make_caches(self, slots: int, positions: int) -> list[KvCache]:
        layers = [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        return [layer.self_attn.make_cache(slots, positions) for layer in layers]

    def embed(self, batch: Batch) -> torch.Tensor:
        """This rank's tokens, BF16 [n, hidden], to be written to. Collective."""
        embedded: torch.Tensor = self.model.embed_tokens(batch.token_ids)
        return embedded[: batch.local_tokens]

    def run(self, embedded: torch.Tensor, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        """Final hidden states of this rank's tokens from their embeddings, BF16 [n, hidden]. Collective."""
        hidden: torch.Tensor = self.model(embedded, batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden, rows, batch.share)
        return logits
