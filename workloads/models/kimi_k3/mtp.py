"""The multi-token-prediction drafter: from the target's hidden state and the next token, the token after it."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.models.batch import Batch
from workloads.models.kimi_k3.decoder import KimiSetting, LayerCache, PlainDecoderLayer
from workloads.models.kimi_k3.tensors import PREFIX
from workloads.models.layers import ParallelLMHead, ReplicatedLinear, RMSNorm, Rows, VocabParallelEmbedding
from workloads.models.served import Drafter


class SharedHead(nn.Module):
    """Norm and output projection of the block, both its own."""

    def __init__(self, setting: KimiSetting, prefix: str) -> None:
        super().__init__()
        config = setting.config
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, f"{prefix}norm.weight")
        self.head = ParallelLMHead(
            setting.groups.tp, config.vocab_size, config.hidden_size, f"{prefix}head.weight"
        )


class MultiTokenPredictor(nn.Module):
    """One MTP block: both inputs normalised, joined, and run through a plain decoder layer."""

    def __init__(self, setting: KimiSetting, layer: int) -> None:
        super().__init__()
        config, prefix = setting.config, f"{PREFIX}model.layers.{layer}."
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps, f"{prefix}enorm.weight")
        self.hnorm = RMSNorm(hidden, eps, f"{prefix}hnorm.weight")
        self.eh_proj = ReplicatedLinear(2 * hidden, [Rows(f"{prefix}eh_proj.weight", hidden)])
        self.mtp_block = PlainDecoderLayer(setting, layer, prefix)
        self.shared_head = SharedHead(setting, f"{prefix}shared_head.")

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        out: torch.Tensor = self.shared_head.norm(self.mtp_block(self.eh_proj(joined), batch, cache))
        return out


class KimiK3MultiTokenPredictorModel(nn.Module):
    """Embedding and block. The block keeps its number in the checkpoint, after the target's layers."""

    def __init__(self, setting: KimiSetting) -> None:
        super().__init__()
        config = setting.config
        self.embed_tokens = VocabParallelEmbedding(
            setting.groups.tp, config.vocab_size, config.hidden_size, f"{PREFIX}model.embed_tokens.weight"
        )
        layer = config.num_layers
        self.layers = nn.ModuleDict({str(layer): MultiTokenPredictor(setting, layer)})

    def forward(self, batch: Batch, hidden: torch.Tensor, caches: Sequence[LayerCache]) -> torch.Tensor:
        embedded = self.embed_tokens(batch.token_ids)[: batch.local_tokens]
        embedded[batch.local_starts] = 0  # the block is trained without an embedding at the first position
        for block, cache in zip(self.layers.values(), caches, strict=True):
            hidden = block(embedded, hidden, batch, cache)
        return hidden


class KimiK3MTP(Drafter):
    """The drafter, loaded as a root of its own from the same checkpoint, embedding included."""

    def __init__(self, setting: KimiSetting) -> None:
        super().__init__()
        if setting.config.num_mtp_layers != 1:
            raise ValueError(
                f"num_mtp_layers is {setting.config.num_mtp_layers}; the drafter has exactly one block."
            )
        self.model = KimiK3MultiTokenPredictorModel(setting)

    def make_caches(self, slots: int, positions: int) -> list[LayerCache]:
        return [block.mtp_block.make_cache(slots, positions) for block in self._blocks()]

    def forward(self, batch: Batch, hidden: torch.Tensor, caches: Sequence[LayerCache]) -> torch.Tensor:
        """batch: the target's batch with every token replaced by the one after it. hidden: BF16 [n, hidden], the
        target's final hidden states of this rank's tokens. Returns BF16 [n, hidden] for `logits`."""
        out: torch.Tensor = self.model(batch, hidden, caches)
        return out

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        (block,) = self._blocks()
        logits: torch.Tensor = block.shared_head.head(hidden, rows, batch.share)
        return logits

    def _blocks(self) -> list[MultiTokenPredictor]:
        return [block for block in self.model.layers.values() if isinstance(block, MultiTokenPredictor)]
