"""Decoder layers: attention over all tokens of a data-parallel rank, everything else over this rank's share."""

from dataclasses import dataclass

import torch
from torch import nn

from workloads.kernels.attention_residual import attention_residual_mix
from workloads.models.batch import Batch
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.kda import KdaCache, KimiDeltaAttention
from workloads.models.kimi_k3.mla import MlaCache, MultiHeadLatentAttention
from workloads.models.kimi_k3.moe import LatentMoE, situ_parameters
from workloads.models.layers import GatedMLP, ReplicatedLinear, RMSNorm, Rows, over_all_tokens
from workloads.models.served import Setting

LayerCache = KdaCache | MlaCache
KimiSetting = Setting[KimiK3Config]


@dataclass
class ResidualStream:
    """The residual stream of this rank's tokens: snapshots at block starts, and the running prefix."""

    blocks: list[torch.Tensor]
    prefix: torch.Tensor


class SubLayers(nn.Module):
    """Attention and feed-forward of one layer with their norms, without what joins them to the residual stream."""

    def __init__(self, setting: KimiSetting, layer: int, prefix: str) -> None:
        super().__init__()
        config, groups = setting.config, setting.groups
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.tp = groups.tp
        self.input_layernorm = RMSNorm(hidden, eps, f"{prefix}input_layernorm.weight")
        attention = MultiHeadLatentAttention if config.is_full_attention(layer) else KimiDeltaAttention
        self.self_attn = attention(config, groups.tp, f"{prefix}self_attn.")
        self.post_attention_layernorm = RMSNorm(hidden, eps, f"{prefix}post_attention_layernorm.weight")
        self.is_dense = config.is_dense(layer)
        if self.is_dense:
            self.mlp = GatedMLP(
                hidden, config.dense_intermediate_size, situ_parameters(config), f"{prefix}mlp."
            )
        else:
            self.block_sparse_moe = LatentMoE(setting, f"{prefix}block_sparse_moe.")

    def make_cache(self, slots: int, positions: int) -> LayerCache:
        cache: LayerCache = self.self_attn.make_cache(slots, positions)
        return cache

    def attend(self, x: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """BF16 [n, hidden], this rank's tokens -> BF16 [n, hidden]. Collective over the TP group."""
        return over_all_tokens(
            self.tp, batch, self.input_layernorm(x), lambda tokens: self.self_attn(tokens, batch, cache)
        )

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [n, hidden] -> BF16 [n, hidden]. Collective over the EP group where there are experts."""
        normed = self.post_attention_layernorm(x)
        out: torch.Tensor = self.mlp(normed) if self.is_dense else self.block_sparse_moe(normed)
        return out


def residual_mixer(hidden: int, eps: float, stem: str) -> tuple[RMSNorm, ReplicatedLinear]:
    """Norm and one-row score projection of an attention-residual mix; `stem` precedes `_norm` and `_proj`."""
    return RMSNorm(hidden, eps, f"{stem}_norm.weight"), ReplicatedLinear(
        hidden, [Rows(f"{stem}_proj.weight", 1)]
    )


def mix(stream: ResidualStream, norm: RMSNorm, proj: ReplicatedLinear) -> torch.Tensor:
    """What a sublayer reads of the stream, BF16 [n, hidden]."""
    if not len(stream.prefix):
        return stream.prefix
    return attention_residual_mix(stream.blocks, stream.prefix, norm.weight, proj.weight, norm.eps)


class DecoderLayer(SubLayers):
    """A layer of the target: both sublayers read a learned mix of the stream's snapshots and its prefix."""

    def __init__(self, setting: KimiSetting, layer: int, prefix: str) -> None:
        super().__init__(setting, layer, prefix)
        config = setting.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.opens_block = layer % config.attn_res_block_size == 0
        self.self_attention_res_norm, self.self_attention_res_proj = residual_mixer(
            hidden, eps, f"{prefix}self_attention_res"
        )
        self.mlp_res_norm, self.mlp_res_proj = residual_mixer(hidden, eps, f"{prefix}mlp_res")

    def forward(self, stream: ResidualStream, batch: Batch, cache: LayerCache) -> None:
        """Advance `stream`. A layer that opens a block snapshots the prefix, and its attention starts a new one."""
        mixed = mix(stream, self.self_attention_res_norm, self.self_attention_res_proj)
        attended = self.attend(mixed, batch, cache)
        if self.opens_block:
            stream.blocks.append(stream.prefix)
            stream.prefix = attended
        else:
            stream.prefix = stream.prefix + attended
        mixed = mix(stream, self.mlp_res_norm, self.mlp_res_proj)
        stream.prefix = stream.prefix + self.feed_forward(mixed)


class PlainDecoderLayer(SubLayers):
    """A layer with ordinary residual connections, as the MTP block has."""

    def forward(self, x: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """BF16 [n, hidden] -> BF16 [n, hidden]."""
        x = x + self.attend(x, batch, cache)
        return x + self.feed_forward(x)
