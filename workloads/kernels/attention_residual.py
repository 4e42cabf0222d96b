"""Attention over the residual stream: a learned mix of block snapshots and the running prefix."""

from collections.abc import Sequence

import torch

from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.norm import rms_scale


def attention_residual_mix(
    blocks: Sequence[torch.Tensor],
    prefix: torch.Tensor,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Softmax-weighted sum of the streams `blocks` and `prefix`, per token.

    blocks: BF16 [T,H] each, oldest first. prefix: BF16 [T,H]. norm_weight [H] and proj_weight [H] or [1,H].
    The logit of a stream v is (v * norm_weight * proj_weight).sum * rsqrt(mean v^2 + eps); the sum takes v itself.
    Returns BF16 [T,H]. Without blocks the mix is the prefix. (Adding to the prefix needs no function here: torch's
    BF16 addition goes through float32, whose 24 bits are enough to round a sum of two BF16 numbers correctly.)
    """
    if not blocks:
        return prefix
    direction = norm_weight.to(torch.float64) * proj_weight.to(torch.float64).view(-1)

    def mixed(*rows: torch.Tensor) -> torch.Tensor:
        streams = torch.stack(rows).to(torch.float64)
        logits = (streams @ direction).unsqueeze(-1) * rms_scale(streams, eps)
        return round_to_bf16((logits.softmax(dim=0) * streams).sum(dim=0))

    return by_rows(mixed, *blocks, prefix)
