"""Decoder layers over the copies of the residual stream, and the rotation tables that they share."""

import torch
from torch import nn

from workloads.kernels.interleaved_rope import Yarn, cos_sin_table, deepseek_frequencies
from workloads.kernels.mhc import mhc_collapse, mhc_expand
from workloads.models.batch import Batch
from workloads.models.deepseek_v4.attention import CompressedAttention, WindowCache
from workloads.models.deepseek_v4.config import DeepseekV4Config, Dimensions
from workloads.models.deepseek_v4.mhc import HyperConnection
from workloads.models.deepseek_v4.moe import MoE
from workloads.models.layers import RMSNorm, over_all_tokens
from workloads.models.served import Setting

V4Setting = Setting[DeepseekV4Config]


class RotaryTable(nn.Module):
    """`cos_sin_cache` FP32 [positions, 2, rope/2], a buffer that is not saved: it follows from the dimensions."""

    cos_sin_cache: torch.Tensor

    def __init__(self, config: Dimensions, compressed: bool) -> None:
        super().__init__()
        yarn = Yarn(
            config.rope_factor,
            config.rope_original_positions,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        theta = config.compress_rope_theta if compressed else config.rope_theta
        serving = torch.get_default_device()
        with torch.device("cpu"):  # whose cosines are the same wherever the model serves
            frequencies = deepseek_frequencies(config.qk_rope_head_dim, theta, yarn if compressed else None)
            table = cos_sin_table(config.max_position_embeddings, frequencies)
        self.register_buffer("cos_sin_cache", table.to(serving), persistent=False)


class DecoderLayer(nn.Module):
    """Attention and experts, each between a collapse of the copies and their expansion.

    first: before it all copies are equal, and its first mix reads one of them.
    """

    def __init__(
        self,
        setting: V4Setting,
        layer: int,
        prefix: str,
        first: bool = False,
        attention: type[CompressedAttention] = CompressedAttention,
    ) -> None:
        super().__init__()
        config, self.tp = setting.config, setting.groups.tp
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.hc_attn = HyperConnection(config, f"{prefix}hc_attn", equal_copies=first)
        self.attn_norm = RMSNorm(hidden, eps, f"{prefix}attn_norm.weight")
        self.attn = attention(config, layer, self.tp, f"{prefix}attn.")
        self.hc_ffn = HyperConnection(config, f"{prefix}hc_ffn")
        self.ffn_norm = RMSNorm(hidden, eps, f"{prefix}ffn_norm.weight")
        self.ffn = MoE(setting, layer, f"{prefix}ffn.")

    def make_cache(self, slots: int, positions: int) -> WindowCache:
        return self.attn.make_cache(slots, positions)

    def finalize_model_state(self) -> None:
        """What the model's hook builds of this layer beside what its modules finalise themselves."""
        self.hc_attn.refresh_broadcast()
        self.ffn.shared_experts.fuse()

    def forward(
        self, x: torch.Tensor, batch: Batch, cache: WindowCache, tables: "RotaryTables"
    ) -> torch.Tensor:
        """BF16 [n, copies, H] -> the same. Collective over the TP and EP groups."""
        table = tables.of(self.attn.ratio)
        mix = self.hc_attn(x)
        attended = over_all_tokens(
            self.tp,
            batch,
            self.attn_norm(mhc_collapse(x, mix.pre)),
            lambda tokens: self.attn(tokens, batch, cache, table),
        )
        x = mhc_expand(x, attended, mix)
        mix = self.hc_ffn(x)
        out = self.ffn(self.ffn_norm(mhc_collapse(x, mix.pre)), batch.local_token_ids)
        return mhc_expand(x, out, mix)


class RotaryTables(nn.Module):
    """Of the layers that compress and of those that do not."""

    def __init__(self, config: Dimensions) -> None:
        super().__init__()
        self.positions = config.max_position_embeddings
        self.plain = RotaryTable(config, compressed=False)
        self.compressed = RotaryTable(config, compressed=True)

    def of(self, ratio: int) -> torch.Tensor:
        return (self.compressed if ratio else self.plain).cos_sin_cache

    def require(self, positions: int) -> None:
        """ValueError when requests may grow longer than the tables."""
        if positions > self.positions:
            raise ValueError(
                f"backend.max_model_len is {positions} and the model's max_position_embeddings {self.positions}: the "
                "rotation tables end there; lower the one or raise the other."
            )
