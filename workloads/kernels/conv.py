"""Causal depthwise convolution with SiLU, over a segment of one request or for one token of many."""

from collections.abc import Sequence

import torch

from workloads.kernels.linear import round_to_bf16


def _silu_of_taps(inputs: Sequence[torch.Tensor], taps: Sequence[torch.Tensor]) -> torch.Tensor:
    """SiLU(sum of inputs[j] * taps[j]), oldest first, rounded once to BF16.

    Products of BF16 and float32 are exact in float64, and both callers add in the same order: a token's sum has
    the same bits in prefill and in decode.
    """
    total = inputs[0].to(torch.float64) * taps[0].to(torch.float64)
    for value, tap in zip(inputs[1:], taps[1:], strict=True):
        total += value.to(torch.float64) * tap.to(torch.float64)
    return round_to_bf16(total * torch.sigmoid(total))


def conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve a segment of one request.

    x: BF16 [T,C], inputs of the segment. weight: float32 [C,W]; the last tap meets the current token; no bias.
    state: BF16 [C,W-1], the inputs before the segment, oldest first; zeros at the start of a request.
    Returns BF16 [T,C] and the state after the segment (a new tensor).
    """
    width = weight.shape[1]
    history = torch.cat([state.t(), x])
    inputs = [history[j : j + x.shape[0]] for j in range(width)]
    out = _silu_of_taps(inputs, weight.unbind(1))
    return out, history[x.shape[0] :].t().contiguous()


def conv_decode(
    x: torch.Tensor, tap_major: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve one token of each of B requests.

    x: BF16 [B,C]. tap_major: float32 [G,W,C/G] from `tap_major_weight`. state: BF16 [B,C,W-1].
    Returns BF16 [B,C] and the states after the token (a new tensor).
    """
    window = torch.cat([state, x.unsqueeze(-1)], dim=-1)
    taps = [tap.flatten() for tap in tap_major.unbind(1)]
    return _silu_of_taps(window.unbind(-1), taps), window[..., 1:].contiguous()


def tap_major_weight(weight: torch.Tensor, groups: int = 3) -> torch.Tensor:
    """Copy of weight [C,W] as [groups,W,C/groups], which decode reads: one plane per tap, groups are q, k and v."""
    planes = weight.view(groups, -1, weight.shape[1]).transpose(1, 2)
    return planes.clone(memory_format=torch.contiguous_format)
