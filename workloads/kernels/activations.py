"""Gated activations of the experts."""

from typing import NamedTuple

import torch
from torch import Tensor


class SituParameters(NamedTuple):
    """Saturation of the gate (`beta`) and of the linear branch (`linear_beta`); defaults are Kimi-K3's."""

    beta: float = 4.0
    linear_beta: float = 25.0


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
