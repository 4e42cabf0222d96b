"""Grouped-query attention with rotary positions: this rank's heads, prefill and decode alike."""

import torch
from torch import nn

from workloads.kernels.gqa import gqa_attention
from workloads.kernels.rope import rotate_half_split
from workloads.models.batch import Batch
from workloads.models.dense.config import DenseConfig
from workloads.models.kv_cache import KvCache
from workloads.models.layers import ColumnParallelLinear, RowParallelLinear, Rows
from workloads.models.parallel import Group


class GroupedQueryAttention(nn.Module):
    """Keys and values are divided over the group by their heads, queries with the keys that they read."""

    def __init__(self, config: DenseConfig, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        _, self.kv_heads = group.share(config.num_kv_heads, "num_kv_heads")
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        rows = [Rows(f"{prefix}{name}_proj.weight", n * self.head_dim) for name, n in heads.items()]
        self.qkv_proj = ColumnParallelLinear(group, hidden, rows)
        width = config.num_heads * self.head_dim
        self.o_proj = RowParallelLinear(group, width, hidden, f"{prefix}o_proj.weight")

    def make_cache(self, slots: int, positions: int) -> KvCache:
        return KvCache.empty(slots, positions, self.kv_heads, self.head_dim)

    def forward(self, x: torch.Tensor, batch: Batch, cache: KvCache, angles: torch.Tensor) -> torch.Tensor:
        """x: BF16 [T, hidden], all tokens of the batch -> this rank's part of the sum, float64 [T, hidden]."""
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv_proj.split(x)[:3])
        q, k = rotate_half_split(q, angles), rotate_half_split(self.normed(k), angles)
        out = torch.empty_like(q)
        for segment in batch.segments:
            held = cache.append(segment, k, v)
            out[segment.rows] = self.attend(q[segment.rows], *held, segment.start)
        partial: torch.Tensor = self.o_proj(out.flatten(1))
        return partial

    def normed(self, k: torch.Tensor) -> torch.Tensor:
        """Keys BF16 [T, kv heads, head_dim] before they are rotated."""
        return k

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
        """Queries of a segment from position `start` on, and what its request's cache holds; as `gqa_attention`."""
        return gqa_attention(q, keys, values, start)
