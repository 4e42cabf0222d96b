"""The order in which a fused attention kernel reads queries and writes outputs: chunks of the heads take turns.

Of queries, 16 channels of each head follow one another, then the next 16 of each; of outputs 32, over the heads that
share an output projection. So the rows of the projection before the kernel, and the columns of the one after it, are
brought into that order once, when they are loaded. It permutes bytes and computes nothing.
"""

import torch
from torch import Tensor


def interleave(x: Tensor, dim: int, heads: int, chunk: int) -> Tensor:
    """x [.., heads * D, ..] along `dim`: place (c * heads + h) * chunk + j gets h * D + c * chunk + j; a new tensor."""
    return torch.unflatten(x, dim, (heads, -1, chunk)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def deinterleave(x: Tensor, dim: int, heads: int, chunk: int) -> Tensor:
    """The inverse of `interleave`."""
    return torch.unflatten(x, dim, (-1, heads, chunk)).transpose(dim, dim + 1).flatten(dim, dim + 2)
