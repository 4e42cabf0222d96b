"""Latent mixture of experts of one layer: router, routed experts of this rank, shared experts."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from workloads.kernels.activations import SituParameters
from workloads.kernels.linear import linear_partial
from workloads.kernels.mega_moe_layout import LAYOUT_MULTIPLE, unfuse_l2_weight
from workloads.kernels.moe import ExpertWeights, MoEKernel
from workloads.kernels.routing import route_sigmoid_noaux
from workloads.loading.weights import Placement, Region, Weight, WeightModule
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.layers import GatedMLP, ReplicatedLinear, RMSNorm, Rows, vector
from workloads.models.parallel import Group

E8M0_ONE = 127.0  # exponent byte of 1.0, which padding of scales is created with
MXFP4_GROUP = 32
RAW = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")

_Pair = tuple[torch.Tensor, torch.Tensor]


def situ_parameters(config: KimiK3Config) -> SituParameters:
    return SituParameters(config.situ_beta, config.situ_linear_beta)


class RoutedExperts(WeightModule):
    """MXFP4 experts of this rank of the EP group.

    Loaded as `w13_weight` U8 [E, 2I, L/2], `w13_weight_scale` U8 [E, 2I, L/32], `w2_weight` U8 [E, L, I/2] and
    `w2_weight_scale` U8 [E, L, I/32], where I is padded to a multiple of 128. A kernel with a layout of its own
    consumes them in `finalize` into two plain tuples; then the parameters are gone.
    """

    def __init__(
        self, config: KimiK3Config, group: Group, kernel: MoEKernel, fused: bool, prefix: str
    ) -> None:
        super().__init__()
        self.kernel, self.fused, self.group = kernel, fused, group
        self.num_experts = config.num_experts
        self.activation = situ_parameters(config)
        self._transformed_l1_weights: _Pair | None = None
        self._transformed_l2_weights: _Pair | None = None
        first, count = group.share(config.num_experts, "num_experts")
        names = [f"{prefix}{expert}." for expert in range(first, first + count)]
        for name, weight in _expert_weights(config, names).items():
            self.add_weight(name, weight)

    def transformed(self) -> ExpertWeights | None:
        """The experts in the kernel's layout, if it has one and they have been finalised."""
        if self._transformed_l1_weights is None or self._transformed_l2_weights is None:
            return None
        return ExpertWeights(*self._transformed_l1_weights, *self._transformed_l2_weights)

    def finalize(self) -> None:
        raw = [tensor for name in RAW if (tensor := self.live(name)) is not None]
        if not self.fused or not raw:  # nothing has been loaded since the last time
            return
        if len(raw) < len(RAW):
            present = [name for name in RAW if self.live(name) is not None]
            raise RuntimeError(
                f"Only {', '.join(present)} of the experts' parameters are there to finalise; a load must restore "
                "all four of them."
            )
        w13, w13_scale, w2, w2_scale = (tensor.detach() for tensor in raw)
        weights = self.kernel.prepare(w13, w13_scale, w2, w2_scale, into=self.transformed())
        self._transformed_l1_weights = (weights.l1_weight, weights.l1_scale)
        self._transformed_l2_weights = (weights.l2_weight, weights.l2_scale)
        for name in RAW:
            self.consume(name)

    def restore(self, name: str) -> torch.Tensor:
        """w2_weight still lies in its loaded layout, under the kernel's alias; the others need new memory."""
        if name == "w2_weight" and self._transformed_l2_weights is not None:
            return unfuse_l2_weight(self._transformed_l2_weights[0])
        return super().restore(name)

    def consumed_weights(self) -> Mapping[str, tuple[str, torch.Tensor]]:
        weights = self.transformed()
        if weights is None:
            return {}
        holders = [f"_transformed_l{layer}_weights[{item}]" for layer in (1, 2) for item in (0, 1)]
        loaded = self.kernel.restore(weights)
        return {name: (holder, tensor) for name, holder, tensor in zip(RAW, holders, loaded, strict=True)}

    def forward(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """x BF16 [T, L], topk_idx int64 [T, K] (-1: none), topk_weights FP32 [T, K] -> BF16 [T, L].

        Collective over the EP group. Raises RuntimeError when the experts are not finalised: a forward pass
        never makes up for a hook that a load path forgot.
        """
        weights = self.transformed()
        if self.fused and weights is None:
            raise RuntimeError(
                "The routed experts are not finalised: the load path did not call the model's "
                "process_weights_after_loading."
            )
        if weights is None:
            weights = ExpertWeights(*(self.get_parameter(name) for name in RAW))
        return self.kernel.forward(
            x, topk_idx, topk_weights, weights, self.group.handle, self.num_experts, self.activation
        )


def _expert_weights(config: KimiK3Config, names: Sequence[str]) -> dict[str, Weight]:
    """The four stacked parameters of the experts whose checkpoint tensors begin with `names`."""
    latent, inner = config.moe_latent_size, config.moe_intermediate_size
    padded = -(-inner // LAYOUT_MULTIPLE) * LAYOUT_MULTIPLE
    weights = {}
    for suffix, source, values, creation in (
        ("", "weight_packed", 2, 0.0),
        ("_scale", "weight_scale", MXFP4_GROUP, E8M0_ONE),
    ):
        columns, down_columns = latent // values, inner // values
        gate_up, down = ((0, inner), (0, columns)), ((0, latent), (0, down_columns))
        w13: list[Placement] = []
        w2: list[Placement] = []
        for e, name in enumerate(names):
            w13.append(_placement(f"{name}w1.{source}", e, gate_up, 0, (padded, columns)))
            w13.append(_placement(f"{name}w3.{source}", e, gate_up, padded, (padded, columns)))
            w2.append(_placement(f"{name}w2.{source}", e, down, 0, (latent, padded // values)))
        w13_shape, w2_shape = (len(names), 2 * padded, columns), (len(names), latent, padded // values)
        weights[f"w13_weight{suffix}"] = Weight(w13_shape, torch.uint8, tuple(w13), creation)
        weights[f"w2_weight{suffix}"] = Weight(w2_shape, torch.uint8, tuple(w2), creation)
    return weights


def _placement(source: str, expert: int, region: Region, start: int, slot: tuple[int, int]) -> Placement:
    """One matrix of one expert at the top left of its slot, which begins at row `start`."""
    (_, rows), (_, columns) = region
    one = (expert, 1)
    return Placement(
        source,
        source_region=region,
        target=(one, (start, rows), (0, columns)),
        slot=(one, (start, slot[0]), (0, slot[1])),
        stacked=True,
    )


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

    def __init__(
        self, config: KimiK3Config, group: Group, kernel: MoEKernel, fused: bool, prefix: str
    ) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.gate = Router(config, f"{prefix}gate.")
        down = Rows(f"{prefix}routed_expert_down_proj.weight", latent)
        self.routed_expert_down_proj = ReplicatedLinear(hidden, [down])
        self.experts = RoutedExperts(config, group, kernel, fused, f"{prefix}experts.")
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
