"""Grouped-query attention of one layer: this rank's heads, with biases, rotation, sinks and, in even layers, a window
of keys."""

import torch

from workloads.kernels.blocks import by_rows
from workloads.kernels.gqa import gqa_attention
from workloads.kernels.linear import linear_partial, round_to_bf16
from workloads.kernels.rope import rotate_half_split
from workloads.loading.weights import Placement, Weight, WeightModule
from workloads.models.batch import Batch
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.models.kv_cache import KvCache
from workloads.models.layers import ColumnParallelLinear, RowParallelLinear, Rows, vector
from workloads.models.parallel import Group


class QKVParallelLinear(ColumnParallelLinear):
    """Projections of queries, keys and values. `bias` BF16 [rows], beside `weight` BF16 [rows, hidden]."""

    bias: torch.Tensor

    def __init__(self, config: GptOssConfig, group: Group, prefix: str) -> None:
        heads = {"q": config.num_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        widths = {f"{prefix}{name}_proj.": count * config.head_dim for name, count in heads.items()}
        rows = [Rows(f"{name}weight", width) for name, width in widths.items()]
        super().__init__(group, config.hidden_size, rows)
        placements, start = [], 0
        for name, width in widths.items():
            first, length = group.share(width, f"Rows of {name}bias")
            here = ((start, length),)
            placements.append(Placement(f"{name}bias", ((first, length),), here, here))
            start += length
        self.add_weight("bias", Weight((start,), torch.bfloat16, tuple(placements)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, hidden] -> BF16 [T, rows]; the bias is added before the one rounding."""
        return by_rows(lambda block: round_to_bf16(linear_partial(block, self.weight) + self.bias), x)


class BiasedRowParallelLinear(RowParallelLinear):
    """`bias` BF16 [out_features] on every rank, added by the first."""

    bias: torch.Tensor

    def __init__(self, group: Group, in_features: int, out_features: int, prefix: str) -> None:
        super().__init__(group, in_features, out_features, f"{prefix}weight")
        self.adds_bias = group.rank == 0
        self.add_weight("bias", vector(f"{prefix}bias", out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = super().forward(x)
        return partial + self.bias if self.adds_bias else partial


class GptOssAttention(WeightModule):
    """window: how many keys a query sees; None: all before it.

    `sinks` BF16 [heads]: of each head a score that takes part in the softmax and has no value.
    """

    sinks: torch.Tensor

    def __init__(self, config: GptOssConfig, group: Group, window: int | None, prefix: str) -> None:
        super().__init__()
        self.dim, self.window = config.head_dim, window
        _, self.kv_heads = group.share(config.num_key_value_heads, "num_key_value_heads")
        self.qkv_proj = QKVParallelLinear(config, group, prefix)
        first, heads = group.share(config.num_heads, "num_heads")
        self.add_weight("sinks", vector(f"{prefix}sinks", heads, start=first))
        width = config.num_heads * self.dim
        self.o_proj = BiasedRowParallelLinear(group, width, config.hidden_size, f"{prefix}o_proj.")

    def make_cache(self, slots: int, positions: int) -> KvCache:
        return KvCache.empty(slots, positions, self.kv_heads, self.dim)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        """x BF16 [T, hidden], all tokens of the batch; rope float64 [T, D], the rows of their positions -> this rank's
        part of the sum, float64 [T, hidden]."""
        q, k, v = (torch.unflatten(part, 1, (-1, self.dim)) for part in self.qkv_proj.split(x)[:3])
        q, k = rotate_half_split(q, rope), rotate_half_split(k, rope)
        out = torch.empty_like(q)
        for segment in batch.segments:
            held = cache.append(segment, k, v)
            out[segment.rows] = gqa_attention(q[segment.rows], *held, segment.start, self.sinks, self.window)
        partial: torch.Tensor = self.o_proj(out.flatten(1))
        return partial
