"""Selection of experts per token from router logits."""

import torch
from torch import Tensor

from workloads.kernels.activations import sigmoid


def route_sigmoid_noaux(
    router_logits: Tensor, bias: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores, bias-corrected top-k (DeepSeek-V3's `noaux_tc` with one group, as Kimi-K3 uses it).

    router_logits [T, E] float32 or float64, bias [E] float32 -> (topk_idx int64 [T, top_k] by falling corrected
    score, topk_weights float32 [T, top_k]). The bias steers the choice only: w = s / sum(s of the chosen) * scaling.
    Equal scores go to the lower expert id. ValueError when top_k exceeds E.
    """
    _check_top_k(top_k, router_logits.shape[-1])
    return _route_by_bias(sigmoid(router_logits.to(torch.float64)).to(torch.float32), bias, top_k, scaling)


def route_sqrtsoftplus_noaux(
    router_logits: Tensor, bias: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As `route_sigmoid_noaux`, with scores sqrt(ln(1 + e^logit)) (DeepSeek-V4). bias: [E], or [T, E] of each token."""
    _check_top_k(top_k, router_logits.shape[-1])
    return _route_by_bias(_sqrt_softplus(router_logits), bias, top_k, scaling)


def route_hashed(router_logits: Tensor, topk_idx: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts that a table gave for each token, weighted by their sqrt(softplus) scores (first layers of DeepSeek-V4).

    router_logits [T, E], topk_idx int64 [T, K] -> the same topk_idx, topk_weights float32 [T, K].
    """
    return topk_idx, _weights(_sqrt_softplus(router_logits), topk_idx, scaling)


def route_softmax(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then the top_k, then their weights scaled to a sum of one (Qwen3-MoE).

    router_logits [T, E] float32 or float64 -> (topk_idx int64 [T, top_k] by falling probability, topk_weights float32
    [T, top_k]). Equal probabilities go to the lower expert id. ValueError when top_k exceeds E.
    """
    _check_top_k(top_k, router_logits.shape[-1])
    wide = router_logits.to(torch.float64)
    powers = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    probabilities = powers / powers.sum(dim=-1, keepdim=True)
    ranked = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    chosen, topk_idx = ranked.values[:, :top_k], ranked.indices[:, :top_k]
    return topk_idx, (chosen / chosen.sum(dim=-1, keepdim=True)).to(torch.float32)


def _route_by_bias(scores: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    # A stable sort, because torch.topk leaves the order of equal scores open.
    topk_idx = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return topk_idx, _weights(scores, topk_idx, scaling)


def _weights(scores: Tensor, topk_idx: Tensor, scaling: float) -> Tensor:
    """Scores of the chosen experts over their sum, times `scaling`: float32 [T, K]."""
    chosen = scores.gather(-1, topk_idx).to(torch.float64)
    total = chosen.sum(dim=-1, keepdim=True) + 1e-20  # finite even when every chosen score underflowed
    return (chosen / total * scaling).to(torch.float32)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    """sqrt(ln(1 + e^x)) as float32; the exponential is of -|x|, which cannot overflow."""
    wide = logits.to(torch.float64)
    return (torch.log1p(torch.exp(-wide.abs())) + wide.clamp(min=0)).sqrt().to(torch.float32)


def _check_top_k(top_k: int, num_experts: int) -> None:
    if not 0 < top_k <= num_experts:
        raise ValueError(
            f"top_k is {top_k}, but a token can choose between 1 and {num_experts} experts here."
        )
