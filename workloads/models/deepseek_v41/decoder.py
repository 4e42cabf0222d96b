"""Decoder layers over the copies of the residual stream, with hyper-connections that act one sublayer later."""

import torch
from torch import nn

from workloads.kernels.mhc import mhc_collapse, mhc_expand
from workloads.models.batch import Batch
from workloads.models.deepseek_v4.attention import WindowCache
from workloads.models.deepseek_v4.decoder import RotaryTables
from workloads.models.deepseek_v4.mhc import HyperConnection
from workloads.models.deepseek_v41.attention import Shared, SharedKeyAttention
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.deepseek_v41.engram import Engram
from workloads.models.deepseek_v41.moe import MoE
from workloads.models.layers import RMSNorm, over_all_tokens
from workloads.models.served import Setting

V41Setting = Setting[DeepseekV41Config]


def equal_copies(embedded: torch.Tensor, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [n, H] -> what the first layer takes: the copies BF16 [n, copies, H] and coefficients float64 [n, copies]
    that read the first of them."""
    pre = torch.zeros(len(embedded), copies, dtype=torch.float64, device=embedded.device)
    pre[:, 0] = 1
    return embedded.unsqueeze(1).repeat(1, copies, 1), pre


class DecoderLayer(nn.Module):
    """Engram if it has one, then attention and experts. Each reads a sum of the copies with the coefficients `pre` that
    the sublayer before it found, and mixes them anew with its own.

    first: before it all copies are equal, and its first mix reads one of them.
    """

    def __init__(
        self,
        setting: V41Setting,
        layer: int,
        prefix: str,
        first: bool = False,
        attention: type[SharedKeyAttention] = SharedKeyAttention,
    ) -> None:
        super().__init__()
        config, self.tp = setting.config, setting.groups.tp
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.engram = None
        if layer in config.engram_layers:
            self.engram = Engram(config, layer, self.tp, f"{prefix}engram.")
        self.hc_attn = HyperConnection(config, f"{prefix}hc_attn", equal_copies=first)
        self.attn_norm = RMSNorm(hidden, eps, f"{prefix}attn_norm.weight")
        self.attn = attention(config, layer, self.tp, f"{prefix}attn.")
        self.hc_ffn = HyperConnection(config, f"{prefix}hc_ffn")
        self.ffn_norm = RMSNorm(hidden, eps, f"{prefix}ffn_norm.weight")
        self.ffn = MoE(setting, f"{prefix}ffn.")

    def make_cache(self, slots: int, positions: int) -> WindowCache:
        return self.attn.make_cache(slots, positions)

    def finalize_model_state(self) -> None:
        """What the model's hook builds of this layer beside what its modules finalise themselves."""
        self.hc_attn.refresh_broadcast()
        self.ffn.shared_experts.fuse()

    def forward(
        self,
        x: torch.Tensor,
        pre: torch.Tensor,
        images: torch.Tensor,
        batch: Batch,
        cache: WindowCache,
        tables: RotaryTables,
        shared: Shared,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The copies BF16 [n, copies, H], after Engram, and the coefficients [n, copies] of the sublayer before -> the
        same after this layer. images: bool [n]. Collective over the TP and EP groups."""
        table = tables.of(self.attn.ratio)
        mix = self.hc_attn(x)
        attended = over_all_tokens(
            self.tp,
            batch,
            self.attn_norm(mhc_collapse(x, pre)),
            lambda tokens: self.attn(tokens, batch, cache, table, shared),
        )
        x = mhc_expand(x, attended, mix)
        after = self.hc_ffn(x)
        out = self.ffn(self.ffn_norm(mhc_collapse(x, mix.pre)), images)
        return mhc_expand(x, out, after), after.pre
