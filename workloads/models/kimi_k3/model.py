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
from workloads.models.pipeline import Stage
from workloads.models.served import Target


class KimiK3Model(nn.Module):
    """Of the embedding, the decoder layers and the final mix and norm, what belongs to this rank's pipeline stage. A
    stage hands on the whole residual stream: the snapshots of all blocks so far, and the prefix; with it what a
    drafter reads of earlier layers."""

    def __init__(self, setting: KimiSetting) -> None:
        super().__init__()
        config, prefix = setting.config, f"{PREFIX}model."
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_size = hidden
        self.stage = stage = Stage.of(setting.groups.pp, config.num_layers)
        self.blocks_before = -(-stage.layers.start // config.attn_res_block_size)
        if stage.is_first or (stage.is_last and config.num_dspark_layers):  # the drafter has no other
            self.embed_tokens = VocabParallelEmbedding(
                setting.groups.tp, config.vocab_size, hidden, f"{prefix}embed_tokens.weight"
            )
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(setting, layer, f"{prefix}layers.{layer}.") for layer in stage.layers}
        )
        if stage.is_last:
            self.output_attn_res_norm, self.output_attn_res_proj = residual_mixer(
                hidden, eps, f"{prefix}output_attn_res"
            )
            self.norm = RMSNorm(hidden, eps, f"{prefix}norm.weight")
        self.taps = frozenset(config.dspark_target_layer_ids if config.num_dspark_layers else ())

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        stream, tapped = self._entering(batch)
        for (number, layer), cache in zip(self.layers.items(), caches, strict=True):
            layer(stream, batch, cache)
            if int(number) in self.taps:
                tapped = [*tapped, stream.prefix]
        if not self.stage.is_last:
            self.stage.send(*stream.blocks, stream.prefix, *tapped)
            return stream.prefix
        hidden: torch.Tensor = self.norm(mix(stream, self.output_attn_res_norm, self.output_attn_res_proj))
        return torch.stack([hidden, *tapped], dim=1) if tapped else hidden

    def _entering(self, batch: Batch) -> tuple[ResidualStream, list[torch.Tensor]]:
        """What this stage's first layer reads, and what a drafter reads of the layers before it."""
        if self.stage.is_first:
            return ResidualStream([], self.embed_tokens(batch.token_ids)[: batch.local_tokens]), []
        shape, blocks = (batch.local_tokens, self.hidden_size), self.blocks_before
        count = blocks + 1 + self.stage.count_before(self.taps)
        received = self.stage.receive([shape] * count, batch.token_ids.device)
        return ResidualStream(received[:blocks], received[blocks]), received[blocks + 1 :]


class KimiK3ForCausalLM(Target):
    """The target. Every rank of the EP group must run the same sequence of forward passes."""

    def __init__(self, setting: KimiSetting) -> None:
        super().__init__()
        config = setting.config
        self.model = KimiK3Model(setting)
        if self.model.stage.is_last:
            self.lm_head = ParallelLMHead(
                setting.groups.tp, config.vocab_size, config.hidden_size, f"{PREFIX}lm_head.weight"
            )

    def make_caches(self, slots: int, positions: int) -> list[LayerCache]:
        """One cache a layer for `slots` requests of up to `positions` tokens each."""
        return [layer.make_cache(slots, positions) for layer in self._layers()]

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Final hidden states of this rank's tokens, BF16 [n, hidden]; for a drafter that reads other layers, too, with
        the residual stream after each of these, BF16 [n, 1 + taps, hidden]. Caches are advanced."""
        hidden: torch.Tensor = self.model(batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        final = hidden[:, 0] if self.model.taps else hidden
        logits: torch.Tensor = self.lm_head(final, rows, batch.share)
        return logits

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers.values() if isinstance(layer, DecoderLayer)]
