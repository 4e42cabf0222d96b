"""Latent mixture of experts of one layer: router, routed experts of this rank, shared experts."""

import torch
from torch import nn

from workloads.kernels.activations import SituParameters
from workloads.kernels.linear import linear_partial
from workloads.kernels.routing import route_sigmoid_noaux
from workloads.loading.weights import Placement, Weight, WeightModule
from workloads.models.experts import ExpertTensors, RoutedExperts
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.layers import GatedMLP, ReplicatedLinear, RMSNorm, Rows, vector
from workloads.models.served import Setting


def situ_parameters(config: KimiK3Config) -> SituParameters:
    return SituParameters(config.situ_beta, config.situ_linear_beta)


class Router(WeightModule):
    """`weight` BF16 [experts, hidden]; `e_score_correction_bias` FP32 [experts] steers the choice only."""

    weight: torch.Tensor
    e_score_correction_bias: torch.Tensor

    def __init__(self, config: KimiK3Config, prefix: str) -> None:
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        shape = (config.num_experts, config.hidden_size)
        region = tuple((0, size) for size in shape)
        self.add_weight(
            "weight",
            Weight(shape, torch.bfloat16, (Placement(f"{prefix}weight", region, region, region),)),
        )
        bias = vector(f"{prefix}e_score_correction_bias", config.num_experts, torch.float32)
        self.add_weight("e_score_correction_bias", bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 [T, hidden] -> topk_idx int64 [T, K], topk_weights FP32 [T, K]."""
        logits = linear_partial(x, self.weight)
        return route_sigmoid_noaux(logits, self.e_score_correction_bias, self.top_k, self.scaling)


class LatentMoE(nn.Module):
    """up(norm(experts(down(x)))) + shared(x). Everything but the routed experts is replicated."""

    def __init__(self, setting: Setting[KimiK3Config], prefix: str) -> None:
        super().__init__()
        config = setting.config
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.gate = Router(config, f"{prefix}gate.")
        down = Rows(f"{prefix}routed_expert_down_proj.weight", latent)
        self.routed_expert_down_proj = ReplicatedLinear(hidden, [down])
        tensors = ExpertTensors(f"{prefix}experts.", config.num_experts, latent, config.moe_intermediate_size)
        self.experts = RoutedExperts(
            tensors,
            situ_parameters(config),
            setting.groups.ep,
            setting.kernel,
            setting.fused,
            setting.redundant_experts,
        )
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, f"{prefix}routed_expert_norm.weight")
        up = Rows(f"{prefix}routed_expert_up_proj.weight", hidden)
        self.routed_expert_up_proj = ReplicatedLinear(latent, [up])
        self.shared_experts = GatedMLP(
            hidden, config.shared_intermediate_size, situ_parameters(config), f"{prefix}shared_experts."
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [n, hidden], this rank's tokens -> BF16 [n, hidden]. Collective over the EP group."""
        routed = self.experts(self.routed_expert_down_proj(x), *self.gate(x))
        if not len(x):  # this rank has only taken part
            return x
        out: torch.Tensor = self.routed_expert_up_proj(self.routed_expert_norm(routed)) + self.shared_experts(
            x
        )
        return out
