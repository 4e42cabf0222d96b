"""Attention with parameter sinks: learned keys and values that every query sees before its request's own."""

from collections.abc import Mapping

import torch
from torch import nn

from workloads.kernels.gqa import gqa_attention
from workloads.loading.weights import Placement, Weight, WeightModule, poison_, whole
from workloads.models.dense.attention import GroupedQueryAttention
from workloads.models.layers import RMSNorm
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.parallel import Group


class SinkAttention(GroupedQueryAttention, WeightModule):
    """Keys are normed per head, then rotated; sink keys are normed and, having no position, not rotated.

    `param_sink_key` and `param_sink_value` BF16 [sinks, kv heads of this rank, head_dim]. Derived: `sink_key`, the
    same shape, `k_layernorm` of `param_sink_key`. It follows from two modules' weights, of which one may not even have
    memory when the other is complete, so nothing but the hook of its root can build it, when all weights are in place.
    As a kernel's own buffer it exists from the start, poisoned.
    """

    param_sink_key: torch.Tensor
    param_sink_value: torch.Tensor
    sink_key: torch.Tensor

    def __init__(self, config: OpenPanguConfig, group: Group, prefix: str) -> None:
        super().__init__(config, group, prefix)
        self.k_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps, f"{prefix}k_layernorm.weight")
        sinks, (first, heads) = config.num_sinks, group.share(config.num_kv_heads, "num_kv_heads")
        shape, region = (sinks, heads, config.head_dim), ((0, sinks), (first, heads), (0, config.head_dim))
        for name in ("param_sink_key", "param_sink_value"):
            placement = Placement(f"{prefix}{name}", region, whole(shape), whole(shape))
            self.add_weight(name, Weight(shape, torch.bfloat16, (placement,)))
        self.set_derived("sink_key", poison_(torch.empty(shape, dtype=torch.bfloat16)))

    def derivations(self) -> Mapping[str, torch.Tensor]:
        return {"sink_key": self.k_layernorm(self.param_sink_key)}

    def post_process(self) -> None:
        """Left to the hook."""

    def refresh_sink_key(self) -> None:
        self.derive()

    def normed(self, k: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.k_layernorm(k)
        return out

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
        """The sinks stand before position 0, so that the causal rule lets every query see them."""
        end = start + q.shape[0]
        keys = torch.cat([self.sink_key, keys[:end]])
        values = torch.cat([self.param_sink_value, values[:end]])
        return gqa_attention(q, keys, values, start + self.sink_key.shape[0])


def refresh_sinks(root: nn.Module) -> None:
    """What the hook of every root with sinks ends with."""
    for module in root.modules():
        if isinstance(module, SinkAttention):
            module.refresh_sink_key()
