"""Kimi-K3, the target model: loaded as one root, run one batch at a time."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.models.batch import Batch
from workloads.models.kimi_k3.decoder import (
    DecoderLayer,
    KimiSetting,
    LayerCache,
    ResidualStream,
    mix,
    residual_mixer,
)
from workloads.models.kimi_k3.tensors import PREFIX
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding
from workloads.models.served import Target


class KimiK3Model(nn.Module):
    """Embedding, decoder layers and the final mix and norm."""

    def __init__(self, setting: KimiSetting) -> None:
        super().__init__()
        config, prefix = setting.config, f"{PREFIX}model."
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = VocabParallelEmbedding(
            setting.groups.tp, config.vocab_size, hidden, f"{prefix}embed_tokens.weight"
        )
        self.layers = nn.ModuleList(
            DecoderLayer(setting, layer, f"{prefix}layers.{layer}.") for layer in range(config.num_layers)
        )
        self.output_attn_res_norm, self.output_attn_res_proj = residual_mixer(
            hidden, eps, f"{prefix}output_attn_res"
        )
        self.norm = RMSNorm(hidden, eps, f"{prefix}norm.weight")

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        stream = ResidualStream([], self.embed_tokens(batch.token_ids)[: batch.local_tokens])
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(stream, batch, cache)
        hidden: torch.Tensor = self.norm(mix(stream, self.output_attn_res_norm, self.output_attn_res_proj))
        return hidden


class KimiK3ForCausalLM(Target):
    """The target. Every rank of the EP group must run the same sequence of forward passes."""

    def __init__(self, setting: KimiSetting) -> None:
        super().__init__()
        config = setting.config
        self.model = KimiK3Model(setting)
        self.lm_head = ParallelLMHead(
            setting.groups.tp, config.vocab_size, config.hidden_size, f"{PREFIX}lm_head.weight"
        )

    def make_caches(self, slots: int, positions: int) -> list[LayerCache]:
        """One cache a layer for `slots` requests of up to `positions` tokens each."""
        return [layer.make_cache(slots, positions) for layer in self._layers()]

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Final hidden states of this rank's tokens, BF16 [n, hidden]; caches are advanced."""
        hidden: torch.Tensor = self.model(batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        logits: torch.Tensor = self.lm_head(hidden, rows, batch.share)
        return logits

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
