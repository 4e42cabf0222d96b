"""DeepSeek-V4.1, the target model: loaded as one root, run one batch at a time."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.kernels.linear import round_to_bf16
from workloads.kernels.mhc import mhc_collapse
from workloads.models.batch import Batch
from workloads.models.deepseek_v4.decoder import RotaryTables
from workloads.models.deepseek_v41.attention import Shared
from workloads.models.deepseek_v41.decoder import DecoderLayer, V41Setting, equal_copies
from workloads.models.deepseek_v41.engram import NgramHash
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding
from workloads.models.pipeline import Stage
from workloads.models.served import Cache
from workloads.models.vision import LanguageModel


class DeepseekV41Model(nn.Module):
    """Of the embedding and the decoder layers, what belongs to this rank's pipeline stage. taps: layers at whose entry
    a drafter reads the copies."""

    def __init__(self, setting: V41Setting) -> None:
        super().__init__()
        config = setting.config
        self.copies, self.hidden_size = config.hc_mult, config.hidden_size
        self.engram_layers = config.engram_layers
        self.stage = stage = Stage.of(setting.groups.pp, config.num_layers)
        if stage.is_first or (stage.is_last and config.num_dspark_layers):  # the drafter has no other
            self.embed_tokens = VocabParallelEmbedding(
                setting.groups.tp, config.vocab_size, config.hidden_size, "embed.weight"
            )
        self.rotary = RotaryTables(config)
        self.engram_hash = NgramHash(config, setting.vocabulary())
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(setting, layer, f"layers.{layer}.", first=layer == 0)
                for layer in stage.layers
            }
        )
        self.taps = frozenset(config.dspark_target_layer_ids if config.num_dspark_layers else ())

    def forward(self, embedded: torch.Tensor, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        """BF16 [n, 1 + taps, H], see `DeepseekV41ForCausalLM.run`."""
        return self.advance(*equal_copies(embedded, self.copies), [], batch, caches)

    def resume(self, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        """`forward` in a stage that is not the first."""
        n, device = batch.local_tokens, batch.token_ids.device
        earlier = [(n, self.hidden_size)] * self.stage.count_before(self.taps)
        x, *tapped = self.stage.receive([(n, self.copies, self.hidden_size), *earlier], device)
        [pre] = self.stage.receive([(n, self.copies)], device, torch.float64)
        return self.advance(x, pre, tapped, batch, caches)

    def advance(
        self,
        x: torch.Tensor,
        pre: torch.Tensor,
        tapped: list[torch.Tensor],
        batch: Batch,
        caches: Sequence[Cache],
    ) -> torch.Tensor:
        """tapped: of the layers of earlier stages."""
        history, *of_layers = caches
        rows = dict(zip(self.engram_layers, self.engram_hash(batch, history), strict=True))
        images, shared = self.engram_hash.of_images(batch.local_token_ids), Shared()
        for number, layer, cache in zip(map(int, self.layers), self.decoder_layers(), of_layers, strict=True):
            if layer.engram is not None:
                x = layer.engram(x, rows[number], images, batch)
            if number in self.taps:
                tapped = [*tapped, round_to_bf16(x.to(torch.float64).mean(dim=1))]
            x, pre = layer(x, pre, images, batch, cache, self.rotary, shared)
        self.stage.send(x, *tapped, pre)
        return torch.stack([mhc_collapse(x, pre), *tapped], dim=1)

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, DecoderLayer)]


class DeepseekV41ForCausalLM(LanguageModel):
    """The target. Every rank of the EP group must run the same sequence of forward passes."""

    def __init__(self, setting: V41Setting) -> None:
        super().__init__()
        config = setting.config
        self.model = DeepseekV41Model(setting)
        if not self.model.stage.is_last:
            return
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, "norm.weight")
        self.lm_head = ParallelLMHead(setting.groups.tp, config.vocab_size, config.hidden_size, "head.weight")

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        for layer in self.model.decoder_layers():
            layer.finalize_model_state()

    def make_caches(self, slots: int, positions: int) -> list[Cache]:
        """The last tokens of `slots` requests, then one cache a layer for up to `positions` tokens each."""
        self.model.rotary.require(positions)
        history = self.model.engram_hash.make_cache(slots)
        return [history, *(layer.make_cache(slots, positions) for layer in self.model.decoder_layers())]

    def forward(self, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        return (
            super().forward(batch, caches) if self.model.stage.is_first else self.model.resume(batch, caches)
        )

    def embed(self, batch: Batch) -> torch.Tensor:
        """Embeddings of this rank's tokens, BF16 [n, H]."""
        embedded: torch.Tensor = self.model.embed_tokens(batch.token_ids)
        return embedded[: batch.local_tokens]

    def run(self, embedded: torch.Tensor, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        """BF16 [n, H] -> BF16 [n, 1 + taps, H] of this rank's tokens: the copies after the last layer in one, with the
        coefficients of its experts' mix, and for a drafter the mean of the copies at the entry of each layer that it
        taps, after Engram. Caches are advanced."""
        hidden: torch.Tensor = self.model(embedded, batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden[:, 0]), rows, batch.share)
        return logits
