"""DeepSeek-V4.1, the target model: loaded as one root, run one batch at a time."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.kernels.linear import round_to_bf16
from workloads.kernels.mhc import mhc_collapse
from workloads.models.batch import Batch
from workloads.models.deepseek_v4.decoder import RotaryTables
from workloads.models.deepseek_v41.attention import Shared
from workloads.models.deepseek_v41.decoder import DecoderLayer, V41Setting
from workloads.models.deepseek_v41.engram import NgramHash
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding
from workloads.models.served import Cache, Target


class DeepseekV41Model(nn.Module):
    """Embedding and decoder layers. tapped: layers at whose entry a drafter reads the copies."""

    def __init__(self, setting: V41Setting) -> None:
        super().__init__()
        config = setting.config
        self.copies, self.tapped = config.hc_mult, frozenset(config.dspark_target_layers)
        self.embed_tokens = VocabParallelEmbedding(
            setting.groups.tp, config.vocab_size, config.hidden_size, "embed.weight"
        )
        self.rotary = RotaryTables(config)
        self.engram_hash = NgramHash(config, setting.vocabulary())
        self.layers = nn.ModuleList(
            DecoderLayer(setting, layer, f"layers.{layer}.", first=layer == 0)
            for layer in range(config.num_layers)
        )

    def forward(self, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        """BF16 [n, 1 + taps, H], see `DeepseekV41ForCausalLM.forward`."""
        history, *of_layers = caches
        rows = iter(self.engram_hash(batch, history))
        images = self.engram_hash.of_images(batch.local_token_ids)
        embedded = self.embed_tokens(batch.token_ids)[: batch.local_tokens]
        x = embedded.unsqueeze(1).repeat(1, self.copies, 1)
        pre = torch.zeros(len(x), self.copies, dtype=torch.float64, device=x.device)
        pre[:, 0] = 1
        shared, taps = Shared(), []
        for number, (layer, cache) in enumerate(zip(self.decoder_layers(), of_layers, strict=True)):
            if layer.engram is not None:
                x = layer.engram(x, next(rows), images, batch)
            if number in self.tapped:
                taps.append(round_to_bf16(x.to(torch.float64).mean(dim=1)))
            x, pre = layer(x, pre, images, batch, cache, self.rotary, shared)
        return torch.stack([mhc_collapse(x, pre), *taps], dim=1)

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


class DeepseekV41ForCausalLM(Target):
    """The target. Every rank of the EP group must run the same sequence of forward passes."""

    def __init__(self, setting: V41Setting) -> None:
        super().__init__()
        config = setting.config
        self.model = DeepseekV41Model(setting)
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
        """BF16 [n, 1 + taps, H] of this rank's tokens: the copies after the last layer in one, with the coefficients of
        its experts' mix, and for a drafter the mean of the copies at the entry of each layer that it taps, after
        Engram. Caches are advanced."""
        hidden: torch.Tensor = self.model(batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden[:, 0]), rows, batch.share)
        return logits
