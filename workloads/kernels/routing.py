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
    num_experts = router_logits.shape[-1]
    if not 0 < top_k <= num_experts:
        raise ValueError(
            f"top_k is {top_k}, but a token can choose between 1 and {num_experts} experts here."
        )
    scores = sigmoid(router_logits.to(torch.float64)).to(torch.float32)
    # A stable sort, because torch.topk leaves the order of equal scores open.
    topk_idx = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(-1, topk_idx).to(torch.float64)
    total = chosen.sum(dim=-1, keepdim=True) + 1e-20  # finite even when every chosen score underflowed
    return topk_idx, (chosen / total * scaling).to(torch.float32)
