"""Mixture of experts of one layer: gate, routed experts of this rank, padded shared experts that every token passes."""

import torch
from torch import nn

from workloads.kernels.activations import SwigluParameters
from workloads.kernels.linear import linear_partial
from workloads.kernels.routing import route_sqrtsoftplus_noaux
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.deepseek_v4.moe import SharedExperts, expert_tensors
from workloads.models.deepseek_v41.config import FP8_BLOCK, DeepseekV41Config
from workloads.models.experts import RoutedExperts
from workloads.models.layers import vector
from workloads.models.served import Setting


class Gate(WeightModule):
    """`weight` BF16 [experts, H]. FP32 [experts], which steer the choice only: `e_score_correction_bias`, and
    `e_score_correction_bias_vl` for tokens of images."""

    weight: torch.Tensor
    e_score_correction_bias: torch.Tensor
    e_score_correction_bias_vl: torch.Tensor

    def __init__(self, config: DeepseekV41Config, prefix: str) -> None:
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.temperature = config.gate_temperature
        shape = (config.num_experts, config.hidden_size)
        placement = Placement(f"{prefix}weight", whole(shape), whole(shape), whole(shape))
        self.add_weight("weight", Weight(shape, torch.bfloat16, (placement,)))
        for name in ("bias", "bias_vl"):
            bias = vector(f"{prefix}{name}", config.num_experts, torch.float32)
            self.add_weight(f"e_score_correction_{name}", bias)

    def forward(self, x: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 [T, H], bool [T], which tokens are of images -> topk_idx int64 [T, K], topk_weights FP32 [T, K]."""
        logits = linear_partial(x, self.weight) / self.temperature
        bias = torch.where(images.unsqueeze(1), self.e_score_correction_bias_vl, self.e_score_correction_bias)
        return route_sqrtsoftplus_noaux(logits, bias, self.top_k, self.scaling)


class MoE(nn.Module):
    """The routed experts' sum and the shared experts, added by the kernel."""

    def __init__(self, setting: Setting[DeepseekV41Config], prefix: str) -> None:
        super().__init__()
        config = setting.config
        self.gate = Gate(config, f"{prefix}gate.")
        tensors = expert_tensors(config, f"{prefix}experts.")
        activation = SwigluParameters(config.swiglu_limit)
        self.experts = RoutedExperts(tensors, activation, setting.groups.ep, setting.kernel, setting.fused)
        self.shared_experts = SharedExperts(
            config,
            setting.kernel,
            setting.fused,
            f"{prefix}shared_experts.",
            FP8_BLOCK,
            config.kernel_intermediate_multiple,
        )

    def forward(self, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """BF16 [n, H], bool [n], this rank's tokens -> BF16 [n, H]. Collective over the EP group."""
        out: torch.Tensor = self.experts(x, *self.gate(x, images), self.shared_experts.weights())
        return out
