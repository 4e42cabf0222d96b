"""Mixture of experts of one layer: gate, routed experts of this rank, shared experts that every token passes."""

import torch
from torch import nn

from workloads.kernels.activations import SwigluParameters
from workloads.kernels.fp8_blocks import BLOCK as FP8_BLOCK
from workloads.kernels.linear import linear_partial
from workloads.kernels.moe import MoEKernel
from workloads.kernels.quantization import BLOCK
from workloads.kernels.routing import route_hashed, route_sqrtsoftplus_noaux
from workloads.kernels.shared_expert import SharedWeights
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.deepseek_v4.config import DeepseekV4Config, Dimensions
from workloads.models.experts import ExpertTensors, RoutedExperts
from workloads.models.fp8_linear import replicated
from workloads.models.layers import vector
from workloads.models.served import Setting

_Pair = tuple[torch.Tensor, torch.Tensor]


class Gate(WeightModule):
    """`weight` BF16 [experts, H], and `e_score_correction_bias` FP32 [experts], which steers the choice only, or, in a
    layer that hashes, `tid2eid` int64 [vocab, K]: the experts of each token id."""

    weight: torch.Tensor
    e_score_correction_bias: torch.Tensor
    tid2eid: torch.Tensor

    def __init__(self, config: DeepseekV4Config, hashed: bool, prefix: str) -> None:
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.hashed = hashed
        self._whole("weight", f"{prefix}weight", (config.num_experts, config.hidden_size), torch.bfloat16)
        if hashed:
            self._whole(
                "tid2eid",
                f"{prefix}tid2eid",
                (config.vocab_size, self.top_k),
                torch.int64,
                config.num_experts,
            )
        else:
            self.add_weight(
                "e_score_correction_bias", vector(f"{prefix}bias", config.num_experts, torch.float32)
            )

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 [T, H], int64 [T] -> topk_idx int64 [T, K], topk_weights FP32 [T, K]."""
        logits = linear_partial(x, self.weight)
        if self.hashed:
            return route_hashed(logits, self.tid2eid[token_ids], self.scaling)
        return route_sqrtsoftplus_noaux(logits, self.e_score_correction_bias, self.top_k, self.scaling)

    def _whole(
        self, name: str, source: str, shape: tuple[int, int], dtype: torch.dtype, below: int | None = None
    ) -> None:
        region = whole(shape)
        placement = Placement(source, region, region, region)
        self.add_weight(name, Weight(shape, dtype, (placement,), below=below))


class SharedExperts(nn.Module):
    """Two FP8 matrices that every rank holds whole. A kernel with a layout of its own computes them beside the routed
    experts; then `fuse`, from the model's hook, brings them there: w13 and both scales as copies, w2 as an alias.

    Its result does not depend on whether the layers have packed their scales before. multiple: to which the kernel
    needs the size between the matrices padded, with zero weights and unit scales.
    """

    def __init__(
        self,
        config: Dimensions,
        kernel: MoEKernel,
        fused: bool,
        prefix: str,
        block: int = FP8_BLOCK,
        multiple: int = 1,
    ) -> None:
        super().__init__()
        self.kernel, self.fused = kernel, fused
        hidden, inner = config.hidden_size, config.shared_intermediate_size
        gate, up = (f"{prefix}w1", inner), (f"{prefix}w3", inner)
        self.gate_up_proj = replicated(hidden, gate, up, block=block, multiples=(multiple, 1))
        self.down_proj = replicated(inner, (f"{prefix}w2", hidden), block=block, multiples=(1, multiple))
        self._shared_l1_weights: _Pair | None = None
        self._shared_l2_weights: _Pair | None = None

    def loaded(self) -> SharedWeights:
        """As the kernel takes them before any layout of its own: scales by row and 32 columns."""
        return SharedWeights(
            self.gate_up_proj.weight.detach(),
            self.gate_up_proj.row_scales(BLOCK),
            self.down_proj.weight.detach(),
            self.down_proj.row_scales(BLOCK),
        )

    def fuse(self) -> None:
        if not self.fused:
            return
        weights = self.kernel.prepare_shared(self.loaded(), into=self.transformed())
        self._shared_l1_weights = (weights.l1_weight, weights.l1_scale)
        self._shared_l2_weights = (weights.l2_weight, weights.l2_scale)

    def transformed(self) -> SharedWeights | None:
        """In the kernel's layout, if it has one and the hook has run."""
        if self._shared_l1_weights is None or self._shared_l2_weights is None:
            return None
        return SharedWeights(*self._shared_l1_weights, *self._shared_l2_weights)

    def weights(self) -> SharedWeights:
        """What the kernel reads. Raises RuntimeError when the hook has not run."""
        if not self.fused:
            return self.loaded()
        weights = self.transformed()
        if weights is None:
            raise RuntimeError(
                "The shared experts are not finalised: the load path did not call the model's "
                "process_weights_after_loading."
            )
        return weights


def expert_tensors(config: Dimensions, prefix: str) -> ExpertTensors:
    return ExpertTensors(
        prefix,
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        "weight",
        "scale",
        torch.int8,
    )


class MoE(nn.Module):
    """The routed experts' sum and the shared experts, added by the kernel."""

    def __init__(self, setting: Setting[DeepseekV4Config], layer: int, prefix: str) -> None:
        super().__init__()
        config = setting.config
        self.gate = Gate(config, config.hashed(layer), f"{prefix}gate.")
        tensors = expert_tensors(config, f"{prefix}experts.")
        activation = SwigluParameters(config.swiglu_limit)
        self.experts = RoutedExperts(
            tensors,
            activation,
            setting.groups.ep,
            setting.kernel,
            setting.fused,
            setting.redundant_experts,
        )
        self.shared_experts = SharedExperts(config, setting.kernel, setting.fused, f"{prefix}shared_experts.")

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """BF16 [n, H], int64 [n], this rank's tokens -> BF16 [n, H]. Collective over the EP group."""
        out: torch.Tensor = self.experts(x, *self.gate(x, token_ids), self.shared_experts.weights())
        return out
