"""Gated activations of the experts."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class GatedActivation(Protocol):
    """What stands between the two matrices of an MLP or an expert."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up: float32 or float64, same shape and dtype -> the same shape and dtype, a new tensor."""
        ...


class SituParameters(NamedTuple):
    """Saturation of the gate (`beta`) and of the linear branch (`linear_beta`); defaults are Kimi-K3's."""

    beta: float = 4.0
    linear_beta: float = 25.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return situ(gate, up, self)


class SwigluParameters(NamedTuple):
    """Clamp of SwiGLU: the gate from above, the linear branch on both sides; infinity leaves both as they are."""

    limit: float = float("inf")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up, self)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), elementwise, in x's dtype.

    Not `torch.sigmoid`: on CPU that rounds the elements of a vector register and those of the tail differently, so
    a token's value would depend on how many tokens stand beside it.
    """
    return torch.exp(-x).add_(1.0).reciprocal_()


def situ(gate: Tensor, up: Tensor, parameters: SituParameters) -> Tensor:
    """SiTU: beta*tanh(g/beta) * sigmoid(g) * linear_beta*tanh(u/linear_beta), in the dtype of gate and up.

    gate, up: float32 or float64, same shape.
    """
    beta, linear_beta = parameters
    gated = torch.tanh(gate / beta).mul_(beta).mul_(sigmoid(gate))
    return gated * torch.tanh(up / linear_beta).mul_(linear_beta)


def swiglu(gate: Tensor, up: Tensor, parameters: SwigluParameters) -> Tensor:
    """SwiGLU: min(g, limit) * sigmoid(min(g, limit)) * clamp(u, -limit, limit), in the dtype of gate and up.

    gate, up: float32 or float64, same shape.
    """
    (limit,) = parameters
    clamped = gate.clamp(max=limit)
    return clamped * sigmoid(clamped) * up.clamp(-limit, limit)
