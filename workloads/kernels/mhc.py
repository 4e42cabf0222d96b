"""Manifold-constrained hyper-connections: a residual stream of several copies, mixed anew around every sublayer.

What a sublayer reads is a weighted sum of the copies, and what it returns is added to a doubly stochastic mix of them.
Coefficients and sums are float64; a copy is rounded once, to BF16, when it is written.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workloads.kernels.activations import sigmoid
from workloads.kernels.blocks import by_rows
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.norm import rms_scale


class MixParameters(NamedTuple):
    """Of one sublayer, with c copies: fn float32 [(2+c)*c, c*H], scale float32 [3], base float32 [(2+c)*c]."""

    fn: Tensor
    scale: Tensor
    base: Tensor


class MixLimits(NamedTuple):
    """rms_eps: inside the root. eps: added to coefficients and to the sums that divide them. iterations: of
    Sinkhorn-Knopp."""

    rms_eps: float
    eps: float
    iterations: int


class Mix(NamedTuple):
    """Coefficients of each token, float64: pre [T, c], post [T, c], comb [T, c, c] from copy j to copy k."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def mhc_mix(x: Tensor, parameters: MixParameters, limits: MixLimits) -> Mix:
    """Coefficients of a sublayer over the copies x BF16 [T, c, H].

    With f the copies one behind another, m = (f fn^T) / rms(f); pre = sigmoid(m s0 + b) + eps of its first c entries,
    post = 2 sigmoid(m s1 + b) of the next c, comb = `sinkhorn` of (m s2 + b) of the rest.
    """
    return _coefficients(
        _projected(x.flatten(1), parameters.fn, limits.rms_eps), parameters, limits, x.shape[1]
    )


def mhc_mix_broadcast(
    x: Tensor, fn_broadcast: Tensor, parameters: MixParameters, limits: MixLimits, copies: int
) -> Mix:
    """`mhc_mix` where all copies are x BF16 [T, H], as before the first layer.

    fn_broadcast: float32 [(2+c)*c, H], `broadcast_fn` of the parameters. rms(f) is then that of one copy.
    """
    return _coefficients(_projected(x, fn_broadcast, limits.rms_eps), parameters, limits, copies)


def broadcast_fn(fn: Tensor, copies: int) -> Tensor:
    """fn float32 [N, c*H] summed over the copies: float32 [N, H], a new tensor, rounded once."""
    return fn.view(fn.shape[0], copies, -1).to(torch.float64).sum(dim=1).to(torch.float32)


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Doubly stochastic matrices from logits float64 [..., c, c], to within eps: softmax of each row plus eps, then
    columns, and alternately rows and columns, divided by their sums plus eps; `iterations` passes in all."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def mhc_collapse(x: Tensor, pre: Tensor) -> Tensor:
    """What a sublayer reads: sum over copies of pre[j] x[j]. x: BF16 [T, c, H], pre: [T, c] -> BF16 [T, H]."""

    def summed(rows: Tensor, weights: Tensor) -> Tensor:
        return round_to_bf16((weights.unsqueeze(1) @ rows.to(torch.float64)).squeeze(1))

    return by_rows(summed, x, pre)


def mhc_expand(x: Tensor, out: Tensor, mix: Mix) -> Tensor:
    """The copies after a sublayer that returned `out`: x'[k] = post[k] out + sum over j of comb[j, k] x[j].

    x: BF16 [T, c, H], out: BF16 [T, H] -> BF16 [T, c, H].
    """

    def mixed(rows: Tensor, added: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        kept = comb.transpose(1, 2) @ rows.to(torch.float64)
        return round_to_bf16(kept + post.unsqueeze(-1) * added.to(torch.float64).unsqueeze(1))

    return by_rows(mixed, x, out, mix.post, mix.comb)


def mhc_head(x: Tensor, parameters: MixParameters, limits: MixLimits) -> Tensor:
    """The copies in one, before the final norm: sum over j of (sigmoid(m[j] scale + base[j]) + eps) x[j].

    x: BF16 [T, c, H]; fn: float32 [c, c*H], scale: [1], base: [c] -> BF16 [T, H].
    """
    m = _projected(x.flatten(1), parameters.fn, limits.rms_eps)
    weights = sigmoid(m * parameters.scale.to(torch.float64) + parameters.base.to(torch.float64)) + limits.eps
    return mhc_collapse(x, weights)


def _projected(flat: Tensor, fn: Tensor, eps: float) -> Tensor:
    """(flat fn^T) / rms(flat): [T, K], [N, K] -> float64 [T, N]."""
    wide = fn.to(torch.float64).t()
    return by_rows(lambda rows: (rows.to(torch.float64) @ wide) * rms_scale(rows, eps), flat)


def _coefficients(m: Tensor, parameters: MixParameters, limits: MixLimits, copies: int) -> Mix:
    scale, base = parameters.scale.to(torch.float64), parameters.base.to(torch.float64)
    sizes = [copies, copies, copies * copies]
    parts = zip(torch.split(m, sizes, dim=-1), torch.split(base, sizes), scale, strict=True)
    pre, post, comb = (part * factor + offset for part, offset, factor in parts)
    return Mix(
        sigmoid(pre) + limits.eps,
        2 * sigmoid(post),
        sinkhorn(torch.unflatten(comb, -1, (copies, copies)), limits.eps, limits.iterations),
    )
