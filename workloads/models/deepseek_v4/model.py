"""DeepSeek-V4, the target model: loaded as one root, run one batch at a time."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.kernels.linear import round_to_bf16
from workloads.models.batch import Batch
from workloads.models.deepseek_v4.attention import WindowCache
from workloads.models.deepseek_v4.decoder import DecoderLayer, RotaryTables, V4Setting
from workloads.models.deepseek_v4.mhc import HyperHead
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding
from workloads.models.pipeline import Stage
from workloads.models.vision import LanguageModel


class DeepseekV4Model(nn.Module):
    """Of the embedding and the decoder layers, what belongs to this rank's pipeline stage. All copies of the residual
    stream go from stage to stage, and what a drafter reads of earlier layers with them."""

    def __init__(self, setting: V4Setting) -> None:
        super().__init__()
        config = setting.config
        self.copies, self.hidden_size = config.hc_mult, config.hidden_size
        self.stage = stage = Stage.of(setting.groups.pp, config.num_layers)
        if stage.is_first or (stage.is_last and config.num_dspark_layers):  # the drafter has no other
            self.embed_tokens = VocabParallelEmbedding(
                setting.groups.tp, config.vocab_size, config.hidden_size, "embed.weight"
            )
        self.rotary = RotaryTables(config)
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(setting, layer, f"layers.{layer}.", first=layer == 0)
                for layer in stage.layers
            }
        )
        self.taps = frozenset(config.dspark_target_layer_ids if config.num_dspark_layers else ())

    def forward(self, embedded: torch.Tensor, batch: Batch, caches: Sequence[WindowCache]) -> torch.Tensor:
        """BF16 [n, H], embeddings of this rank's tokens -> the copies after the last layer, BF16 [n, copies, H]; for a
        drafter that reads other layers, too, with the mean of the copies after each of these, BF16 [n, copies + taps,
        H]."""
        return self.advance(embedded.unsqueeze(1).repeat(1, self.copies, 1), [], batch, caches)

    def resume(self, batch: Batch, caches: Sequence[WindowCache]) -> torch.Tensor:
        """`forward` in a stage that is not the first."""
        n, width, device = batch.local_tokens, self.hidden_size, batch.token_ids.device
        earlier = [(n, 1, width)] * self.stage.count_before(self.taps)
        x, *tapped = self.stage.receive([(n, self.copies, width), *earlier], device)
        return self.advance(x, tapped, batch, caches)

    def advance(
        self, x: torch.Tensor, tapped: list[torch.Tensor], batch: Batch, caches: Sequence[WindowCache]
    ) -> torch.Tensor:
        """tapped: of the layers of earlier stages."""
        for (number, layer), cache in zip(self.layers.items(), caches, strict=True):
            x = layer(x, batch, cache, self.rotary)
            if int(number) in self.taps:
                tapped = [*tapped, round_to_bf16(x.to(torch.float64).mean(dim=1, keepdim=True))]
        self.stage.send(x, *tapped)
        return torch.cat([x, *tapped], dim=1) if tapped else x


class DeepseekV4ForCausalLM(LanguageModel):
    """The target. Every rank of the EP group must run the same sequence of forward passes."""

    def __init__(self, setting: V4Setting) -> None:
        super().__init__()
        config = setting.config
        self.model = DeepseekV4Model(setting)
        if not self.model.stage.is_last:
            return
        self.hc_head = HyperHead(config, "hc_head")
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, "norm.weight")
        self.lm_head = ParallelLMHead(setting.groups.tp, config.vocab_size, config.hidden_size, "head.weight")

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        for layer in self._layers():
            layer.finalize_model_state()

    def make_caches(self, slots: int, positions: int) -> list[WindowCache]:
        """One cache a layer for `slots` requests of up to `positions` tokens each."""
        self.model.rotary.require(positions)
        return [layer.make_cache(slots, positions) for layer in self._layers()]

    def forward(self, batch: Batch, caches: Sequence[WindowCache]) -> torch.Tensor:
        return (
            super().forward(batch, caches) if self.model.stage.is_first else self.model.resume(batch, caches)
        )

    def embed(self, batch: Batch) -> torch.Tensor:
        """Embeddings of this rank's tokens, BF16 [n, H]."""
        embedded: torch.Tensor = self.model.embed_tokens(batch.token_ids)
        return embedded[: batch.local_tokens]

    def run(self, embedded: torch.Tensor, batch: Batch, caches: Sequence[WindowCache]) -> torch.Tensor:
        """BF16 [n, H] -> what `DeepseekV4Model` returns; caches are advanced."""
        hidden: torch.Tensor = self.model(embedded, batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        copies = hidden[:, : self.model.copies]
        logits: torch.Tensor = self.lm_head(self.norm(self.hc_head(copies)), rows, batch.share)
        return logits

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers.values() if isinstance(layer, DecoderLayer)]
