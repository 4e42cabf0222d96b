"""Grouped-query attention of one layer: this rank's heads, normalised, turned, cached, the same for prefill and
decode."""

import torch
from torch import nn

from workloads.kernels.gqa import gqa_attention
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.rope import rope_table, rotate_half_split
from workloads.models.batch import Batch
from workloads.models.kv_cache import KvCache
from workloads.models.layers import RMSNorm
from workloads.models.parallel import Group
from workloads.models.qwen3.config import Qwen3Config
from workloads.models.qwen3.matrices import MATRICES, Piece


class RotaryEmbedding(nn.Module):
    """`cos_sin_cache`, a buffer that no checkpoint holds: FP32 [positions, D]."""

    cos_sin_cache: torch.Tensor

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        table = rope_table(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> FP32 [T, D], cosines before sines."""
        return self.cos_sin_cache[positions]


class Attention(nn.Module):
    """Queries and keys are normalised per head before they are turned."""

    def __init__(self, config: Qwen3Config, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, eps, self.head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        first, self.heads = group.share(config.num_heads, "num_heads")
        first_kv, self.kv_heads = group.share(config.num_key_value_heads, "num_key_value_heads")
        matrices = MATRICES[config.quantization]

        def heads_of(name: str, start: int, count: int) -> Piece:
            rows = (start * self.head_dim, count * self.head_dim)
            return Piece(f"{prefix}{name}_proj", rows, (0, hidden), (rows[1], hidden))

        key_value = [heads_of(name, first_kv, self.kv_heads) for name in ("k", "v")]
        self.qkv_proj = matrices([[heads_of("q", first, self.heads), *key_value]])
        columns = (first * self.head_dim, self.heads * self.head_dim)
        self.o_proj = matrices([[Piece(f"{prefix}o_proj", (0, hidden), columns, (hidden, columns[1]))]])
        self.q_norm = RMSNorm(self.head_dim, eps, f"{prefix}q_norm.weight")
        self.k_norm = RMSNorm(self.head_dim, eps, f"{prefix}k_norm.weight")

    def make_cache(self, slots: int, positions: int) -> KvCache:
        return KvCache.empty(slots, positions, self.kv_heads, self.head_dim)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        """x: BF16 [T, hidden], all tokens of the batch; rotation: of each. Returns this rank's part of the sum, float64
        [T, hidden]."""
        qkv = torch.unflatten(round_to_bf16(self.qkv_proj.product(x)), 1, (-1, self.head_dim))
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        q = rotate_half_split(self.q_norm(q), rotation)
        k = rotate_half_split(self.k_norm(k), rotation)
        out = torch.empty_like(q)
        for segment in batch.segments:
            held = cache.append(segment, k, v)
            out[segment.rows] = gqa_attention(q[segment.rows], *held, segment.start)
        return self.o_proj.product(out.flatten(1))
