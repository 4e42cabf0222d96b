"""Keys of earlier tokens that several layers share: made by a source layer, scored by the indexers of others."""

import torch
from torch import nn

from workloads.kernels.compressed_attention import pool, through_mxfp4
from workloads.kernels.interleaved_rope import rotate
from workloads.kernels.linear import linear_partial
from workloads.models.batch import Segment
from workloads.models.deepseek_v4.compressor import IndexQueries
from workloads.models.deepseek_v41.config import FP8_BLOCK, DeepseekV41Config
from workloads.models.layers import ReplicatedLinear, RMSNorm, Rows


class Compressor(nn.Module):
    """Pools every `ratio` tokens into one latent vector; with a ratio of 1 there is nothing to pool."""

    def __init__(self, config: DeepseekV41Config, ratio: int, prefix: str) -> None:
        super().__init__()
        self.ratio, dim = ratio, config.head_dim
        names = ("wkv",) if ratio == 1 else ("wkv", "wgate")
        rows = [Rows(f"{prefix}{name}.weight", dim) for name in names]
        self.fused_wkv_wgate = ReplicatedLinear(config.hidden_size, rows)
        self.width = len(names) * dim
        self.norm = RMSNorm(dim, config.rms_norm_eps, f"{prefix}norm.weight")

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, H] -> values, beside them scores if there are any: FP32 [T, width] rounded once."""
        return linear_partial(x, self.fused_wkv_wgate.matrix()).to(torch.float32)

    def latents(self, piece: Segment, projected: torch.Tensor, open_tokens: torch.Tensor) -> torch.Tensor:
        """BF16 [G, d] of the groups that a piece completes.

        projected: the piece's rows of `project`. open_tokens: FP32 [slots, ratio, width], what is projected of the last
        tokens of each request, token p at p mod ratio; the piece's are left there.
        """
        first, last = piece.start // self.ratio, piece.end // self.ratio
        before = torch.arange(first * self.ratio, piece.start, device=projected.device)
        rows = torch.cat([open_tokens[piece.slot, before % self.ratio], projected])
        kept = min(piece.length, self.ratio)
        at = torch.arange(piece.end - kept, piece.end, device=projected.device)
        open_tokens[piece.slot, at % self.ratio] = projected[-kept:]
        groups = rows[: (last - first) * self.ratio].view(last - first, self.ratio, self.width)
        if self.ratio == 1:
            return self._normalised(groups[:, 0])
        return self._normalised(pool(*groups.chunk(2, dim=-1)))

    def _normalised(self, pooled: torch.Tensor) -> torch.Tensor:
        latents: torch.Tensor = self.norm(pooled)
        return latents


class Indexer(IndexQueries):
    """Scores the keys of the latest source. makes_keys: of those that belong to this layer."""

    def __init__(self, config: DeepseekV41Config, makes_keys: bool, prefix: str) -> None:
        super().__init__(config, prefix, through_mxfp4, FP8_BLOCK)
        if makes_keys:
            self.wk = ReplicatedLinear(config.head_dim, [Rows(f"{prefix}wk.weight", self.dim)])
            self.k_norm = RMSNorm(self.dim, config.rms_norm_eps, f"{prefix}k_norm.weight")

    def keys(self, latents: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """BF16 [G, d], FP32 [G, 2, rope/2] -> BF16 [G, dim] in FP4."""
        return through_mxfp4(rotate(self.k_norm(self.wk(latents)), cos_sin))
