"""The multi-token-prediction drafter: from the target's copies and the next token, the token after it."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.models.batch import Batch
from workloads.models.deepseek_v4.attention import WindowCache
from workloads.models.deepseek_v4.decoder import DecoderLayer, RotaryTables, V4Setting
from workloads.models.deepseek_v4.mhc import HyperHead
from workloads.models.fp8_linear import replicated
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding
from workloads.models.served import Drafter


class MultiTokenPredictor(nn.Module):
    """Both inputs normalised and projected, added copy by copy, and run through a decoder layer."""

    def __init__(self, setting: V4Setting, prefix: str) -> None:
        super().__init__()
        config = setting.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps, f"{prefix}enorm.weight")
        self.hnorm = RMSNorm(hidden, eps, f"{prefix}hnorm.weight")
        self.e_proj = replicated(hidden, (f"{prefix}e_proj", hidden))
        self.h_proj = replicated(hidden, (f"{prefix}h_proj", hidden))
        self.mtp_block = DecoderLayer(setting, config.num_layers, prefix)
        self.hc_head = HyperHead(config, f"{prefix}hc_head")
        self.norm = RMSNorm(hidden, eps, f"{prefix}norm.weight")

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        batch: Batch,
        cache: WindowCache,
        tables: RotaryTables,
    ) -> torch.Tensor:
        """embedded BF16 [n, H], hidden BF16 [n, copies, H] -> BF16 [n, copies, H]."""
        copies = self.h_proj(self.hnorm(hidden).flatten(0, 1)).view(hidden.shape)
        x = self.e_proj(self.enorm(embedded)).unsqueeze(1) + copies
        out: torch.Tensor = self.mtp_block(x, batch, cache, tables)
        return out


class DeepseekV4MTP(Drafter):
    """The drafter, loaded as a root of its own from the same checkpoint, with the target's embedding and head."""

    def __init__(self, setting: V4Setting) -> None:
        super().__init__()
        config, tp = setting.config, setting.groups.tp
        if config.num_mtp_layers != 1:
            raise ValueError(f"num_mtp_layers is {config.num_mtp_layers}; the drafter has exactly one block.")
        self.embed_tokens = VocabParallelEmbedding(tp, config.vocab_size, config.hidden_size, "embed.weight")
        self.rotary = RotaryTables(config)
        self.block = MultiTokenPredictor(setting, "mtp.0.")
        self.lm_head = ParallelLMHead(tp, config.vocab_size, config.hidden_size, "head.weight")

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        self.block.mtp_block.finalize_model_state()

    def make_caches(self, slots: int, positions: int) -> list[WindowCache]:
        self.rotary.require(positions)
        return [self.block.mtp_block.make_cache(slots, positions)]

    def forward(self, batch: Batch, hidden: torch.Tensor, caches: Sequence[WindowCache]) -> torch.Tensor:
        """batch: the target's with every token replaced by the one after it. hidden: BF16 [n, copies, H], what the
        target returned. Returns BF16 [n, copies, H] for `logits`."""
        embedded = self.embed_tokens(batch.token_ids)[: batch.local_tokens]
        embedded[batch.local_starts] = 0  # the block is trained without an embedding at the first position
        (cache,) = caches
        out: torch.Tensor = self.block(embedded, hidden, batch, cache, self.rotary)
        return out

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        collapsed = self.block.norm(self.block.hc_head(hidden))
        logits: torch.Tensor = self.lm_head(collapsed, rows, batch.share)
        return logits
