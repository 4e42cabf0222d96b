"""Hyper-connections around a sublayer, and the collapse before the output head."""

from collections.abc import Mapping

import torch

from workloads.kernels.mhc import (
    Mix,
    MixLimits,
    MixParameters,
    broadcast_fn,
    mhc_head,
    mhc_mix,
    mhc_mix_broadcast,
)
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.deepseek_v4.config import Dimensions


class _Mixer(WeightModule):
    """`fn` FP32 [rows, copies*H], `scale` FP32 [scales], `base` FP32 [rows]."""

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor

    def __init__(self, config: Dimensions, rows: int, scales: int, stem: str) -> None:
        super().__init__()
        self.copies = config.hc_mult
        self.limits = MixLimits(config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
        shapes = {"fn": (rows, self.copies * config.hidden_size), "scale": (scales,), "base": (rows,)}
        for name, shape in shapes.items():
            region = whole(shape)
            placement = Placement(f"{stem}_{name}", region, region, region)
            self.add_weight(name, Weight(shape, torch.float32, (placement,)))

    def parameters_of_mix(self) -> MixParameters:
        return MixParameters(self.fn, self.scale, self.base)


class HyperConnection(_Mixer):
    """Of one sublayer; in the first layer, where all copies are equal, through a projection of one copy.

    Derived there, by the model's hook: `hc_attn_fn_broadcast` FP32 [(2+c)*c, H], `fn` summed over the copies.
    """

    def __init__(self, config: Dimensions, stem: str, equal_copies: bool = False) -> None:
        copies = config.hc_mult
        super().__init__(config, (2 + copies) * copies, 3, stem)
        self.equal_copies = equal_copies
        self.hc_attn_fn_broadcast: torch.Tensor | None = None

    def derivations(self) -> Mapping[str, torch.Tensor]:
        return {"hc_attn_fn_broadcast": broadcast_fn(self.fn, self.copies)} if self.equal_copies else {}

    def post_process(self) -> None:
        """Left to the hook."""

    def refresh_broadcast(self) -> None:
        """Build the derived projection of the first layer, or refresh it in its storage."""
        self.derive()

    def forward(self, x: torch.Tensor) -> Mix:
        """BF16 [n, copies, H] -> the coefficients of each token. Raises RuntimeError when the hook has not run."""
        if not self.equal_copies:
            return mhc_mix(x, self.parameters_of_mix(), self.limits)
        if self.hc_attn_fn_broadcast is None:
            raise RuntimeError(
                "hc_attn_fn_broadcast does not exist: the load path did not call the model's "
                "process_weights_after_loading."
            )
        return mhc_mix_broadcast(
            x[:, 0], self.hc_attn_fn_broadcast, self.parameters_of_mix(), self.limits, self.copies
        )


class HyperHead(_Mixer):
    """The copies in one."""

    def __init__(self, config: Dimensions, stem: str) -> None:
        super().__init__(config, config.hc_mult, 1, stem)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [n, copies, H] -> BF16 [n, H]."""
        return mhc_head(x, self.parameters_of_mix(), self.limits)
