"""The multi-token-prediction drafter: a decoder layer with sinks of its own, loaded as a root of its own."""

from collections.abc import Sequence

import torch

from workloads.kernels.rope import rope_frequencies
from workloads.models.batch import Batch
from workloads.models.dense.model import DecoderLayer
from workloads.models.kv_cache import KvCache
from workloads.models.layers import ParallelLMHead, ReplicatedLinear, RMSNorm, Rows, VocabParallelEmbedding
from workloads.models.openpangu.attention import SinkAttention, refresh_sinks
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.rotary import RotaryEmbedding
from workloads.models.served import Drafter, Setting


class OpenPanguMTP(Drafter):
    """One block after the target's last layer. Embedding and rotation are its own copies.

    Its hook is its own too: the target's does not reach the sinks of a drafter.
    """

    def __init__(self, setting: Setting[OpenPanguConfig]) -> None:
        super().__init__()
        config, group = setting.config, setting.groups.tp
        hidden, eps, vocab = config.hidden_size, config.rms_norm_eps, config.vocab_size
        prefix = f"{config.prefix}model."
        self.embed_tokens = VocabParallelEmbedding(group, vocab, hidden, f"{prefix}embed_tokens.weight")
        self.rotary_emb = RotaryEmbedding(rope_frequencies(config.head_dim, config.rope_theta))
        prefix = f"{prefix}layers.{config.num_layers}."
        self.enorm = RMSNorm(hidden, eps, f"{prefix}enorm.weight")
        self.hnorm = RMSNorm(hidden, eps, f"{prefix}hnorm.weight")
        self.eh_proj = ReplicatedLinear(2 * hidden, [Rows(f"{prefix}eh_proj.weight", hidden)])
        self.mtp_block = DecoderLayer(config, group, prefix, SinkAttention)
        self.norm = RMSNorm(hidden, eps, f"{prefix}shared_head.norm.weight")
        self.head = ParallelLMHead(group, vocab, hidden, f"{prefix}shared_head.head.weight")

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        refresh_sinks(self)

    def make_caches(self, slots: int, positions: int) -> list[KvCache]:
        return [self.mtp_block.self_attn.make_cache(slots, positions)]

    def forward(self, batch: Batch, hidden: torch.Tensor, caches: Sequence[KvCache]) -> torch.Tensor:
        """Returns BF16 [n, hidden] for `logits`."""
        embedded = self.embed_tokens(batch.token_ids)[: batch.local_tokens]
        embedded[batch.local_starts] = 0  # the block is trained without an embedding at the first position
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        out: torch.Tensor = self.norm(
            self.mtp_block(joined, batch, caches[0], self.rotary_emb(batch.positions))
        )
        return out

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden, rows, batch.share)
        return logits
