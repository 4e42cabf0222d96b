"""Qwen3, the target model: loaded as one root, run one batch at a time."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.loading.weights import WeightModule
from workloads.models.batch import Batch
from workloads.models.kv_cache import KvCache
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding, over_all_tokens
from workloads.models.parallel import Group, RankGroups, largest
from workloads.models.pipeline import Stage
from workloads.models.qwen3.attention import Attention, RotaryEmbedding
from workloads.models.qwen3.config import Qwen3Config
from workloads.models.qwen3.mlp import MLP, SparseMoE
from workloads.models.served import Target


class DecoderLayer(nn.Module):
    """Attention and MLP, or experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: Qwen3Config, groups: RankGroups, prefix: str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.tp = groups.tp
        self.input_layernorm = RMSNorm(hidden, eps, f"{prefix}input_layernorm.weight")
        self.self_attn = Attention(config, groups.tp, f"{prefix}self_attn.")
        self.post_attention_layernorm = RMSNorm(hidden, eps, f"{prefix}post_attention_layernorm.weight")
        sparse = config.num_experts > 0
        self.mlp = (
            SparseMoE(config, groups, f"{prefix}mlp.") if sparse else MLP(config, groups.tp, f"{prefix}mlp.")
        )

    def forward(
        self, x: torch.Tensor, rotation: torch.Tensor, batch: Batch, cache: KvCache, capacity: int
    ) -> torch.Tensor:
        """BF16 [n, hidden], this rank's tokens -> BF16 [n, hidden]. capacity: most tokens of any rank that
        shares the MLP or the experts."""

        def attend(tokens: torch.Tensor) -> torch.Tensor:
            partial: torch.Tensor = self.self_attn(tokens, rotation, batch, cache)
            return partial

        x = x + over_all_tokens(self.tp, batch, self.input_layernorm(x), attend)
        out: torch.Tensor = self.mlp(self.post_attention_layernorm(x), capacity)
        return x + out


class Qwen3Model(nn.Module):
    """Of the embedding, the decoder layers and the final norm, what belongs to this rank's pipeline stage. An embedding
    that is the output projection, too, belongs to the first and to the last."""

    def __init__(self, config: Qwen3Config, groups: RankGroups) -> None:
        super().__init__()
        self.experts_over = groups.ep if config.num_experts else None
        self.hidden_size = config.hidden_size
        self.stage = stage = Stage.of(groups.pp, config.num_layers)
        if stage.is_first or (stage.is_last and config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(
                groups.tp, config.vocab_size, config.hidden_size, "model.embed_tokens.weight"
            )
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(config, groups, f"model.layers.{layer}.") for layer in stage.layers}
        )
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, "model.norm.weight")

    def forward(self, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        capacity = batch.share if self.experts_over is None else largest(self.experts_over, batch.share)
        rotation = self.rotary_emb(batch.positions)
        x = self._entering(batch)
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            x = layer(x, rotation, batch, cache, capacity)
        self.stage.send(x)
        return self.norm(x) if self.stage.is_last else x

    def _entering(self, batch: Batch) -> torch.Tensor:
        """What this stage's first layer reads, BF16 [n, hidden]."""
        if self.stage.is_first:
            embedded: torch.Tensor = self.embed_tokens(batch.token_ids)
            return embedded[: batch.local_tokens]
        [x] = self.stage.receive([(batch.local_tokens, self.hidden_size)], batch.token_ids.device)
        return x


class TiedLMHead(ParallelLMHead):
    """The output projection where it is the embedding: the same parameter, so that an update reaches both."""

    def __init__(self, group: Group, embedding: VocabParallelEmbedding) -> None:
        WeightModule.__init__(self)  # it declares no weight of its own
        self.group = group
        self.register_parameter("weight", embedding.get_parameter("weight"))


class Qwen3ForCausalLM(Target):
    """The target, dense or with experts. Every rank of the EP group must run the same sequence of forward passes."""

    def __init__(self, config: Qwen3Config, groups: RankGroups) -> None:
        super().__init__()
        self.positions = config.max_position_embeddings
        self.model = Qwen3Model(config, groups)
        if not self.model.stage.is_last:
            return
        if config.tie_word_embeddings:
            self.lm_head: ParallelLMHead = TiedLMHead(groups.tp, self.model.embed_tokens)
        else:
            self.lm_head = ParallelLMHead(groups.tp, config.vocab_size, config.hidden_size, "lm_head.weight")

    def make_caches(self, slots: int, positions: int) -> list[KvCache]:
        """Raises ValueError for more positions than the rotation has."""
        if positions > self.positions:
            raise ValueError(
                f"Requests of {positions} tokens are longer than model.qwen3.max_position_embeddings "
                f"{self.positions}: lower backend.max_model_len."
            )
        layers = [layer for layer in self.model.layers.values() if isinstance(layer, DecoderLayer)]
        return [layer.self_attn.make_cache(slots, positions) for layer in layers]

    def forward(self, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        """Final hidden states of this rank's tokens, BF16 [n, hidden]; caches are advanced."""
        hidden: torch.Tensor = self.model(batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """FP32 [R, vocab] of the batch's rows int64 [R], on every rank of the TP group."""
        logits: torch.Tensor = self.lm_head(hidden, rows, batch.share)
        return logits
