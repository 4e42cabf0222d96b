"""gpt-oss: loaded as one root, run one batch at a time."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.kernels.rope import yarn_concentration, yarn_frequencies
from workloads.models.batch import Batch
from workloads.models.gpt_oss.attention import GptOssAttention
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.models.gpt_oss.moe import MixtureOfExperts
from workloads.models.kv_cache import KvCache
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding, over_all_tokens
from workloads.models.rotary import RotaryEmbedding
from workloads.models.served import Setting, Target

GptOssSetting = Setting[GptOssConfig]


def _rotary_embedding(config: GptOssConfig) -> RotaryEmbedding:
    """With YaRN's frequencies."""
    frequencies = yarn_frequencies(
        config.head_dim,
        config.rope_theta,
        config.rope_factor,
        config.rope_original_positions,
        config.rope_beta_fast,
        config.rope_beta_slow,
    )
    return RotaryEmbedding(frequencies, yarn_concentration(config.rope_factor))


class DecoderLayer(nn.Module):
    """Attention and experts with their norms and residual connections."""

    def __init__(self, setting: GptOssSetting, layer: int, prefix: str) -> None:
        super().__init__()
        config, self.tp = setting.config, setting.groups.tp
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, f"{prefix}input_layernorm.weight")
        self.self_attn = GptOssAttention(config, self.tp, config.window(layer), f"{prefix}self_attn.")
        self.post_attention_layernorm = RMSNorm(hidden, eps, f"{prefix}post_attention_layernorm.weight")
        self.mlp = MixtureOfExperts(config, setting.groups, f"{prefix}mlp.")

    def forward(self, x: torch.Tensor, rope: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        """BF16 [n, hidden], this rank's tokens -> BF16 [n, hidden]. Collective."""
        normed = self.input_layernorm(x)
        x = x + over_all_tokens(
            self.tp, batch, normed, lambda tokens: self.self_attn(tokens, rope, batch, cache)
        )
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class GptOssModel(nn.Module):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, setting: GptOssSetting) -> None:
        super().__init__()
        config = setting.config
        self.embed_tokens = VocabParallelEmbedding(
            setting.groups.tp, config.vocab_size, config.hidden_size, "model.embed_tokens.weight"
        )
        self.rotary_emb = _rotary_embedding(config)
        self.layers = nn.ModuleList(
            DecoderLayer(setting, layer, f"model.layers.{layer}.") for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, "model.norm.weight")

    def forward(self, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        x = self.embed_tokens(batch.token_ids)[: batch.local_tokens]
        rope = self.rotary_emb(batch.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, batch, cache)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class GptOssForCausalLM(Target):
    """Every rank of the group that shares the experts must run the same sequence of forward passes."""

    def __init__(self, setting: GptOssSetting) -> None:
        super().__init__()
        config = setting.config
        self.model = GptOssModel(setting)
        self.lm_head = ParallelLMHead(
            setting.groups.tp, config.vocab_size, config.hidden_size, "lm_head.weight"
        )

    def make_caches(self, slots: int, positions: int) -> list[KvCache]:
        layers = [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        return [layer.self_attn.make_cache(slots, positions) for layer in layers]

    def forward(self, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        hidden: torch.Tensor = self.model(batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden, rows, batch.share)
        return logits
