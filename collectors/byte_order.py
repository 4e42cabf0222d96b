"""Compares the bytes of two tensors in other ways than one by one: as a multiset, and moved by some rows."""

import torch
from torch import Tensor

_MATRIX = 2  # dimensions of one; a tensor of more stacks them
_TELLING = 16  # bytes that are not equal by chance


def flat_bytes(tensor: Tensor) -> Tensor:
    """U8 [nbytes] on the host."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def counts_of_bytes(flat: Tensor) -> Tensor:
    """How often each byte value occurs in U8 [n]: int64 [256]."""
    return torch.bincount(flat, minlength=256)


def rows_too_early(live: Tensor, wanted: Tensor, shape: torch.Size) -> int:
    """By how many rows of one matrix, or of each of several, the live rows come too early, as those of a share that
    begins at another row do; 0 where they are not the wanted ones. Both U8 [n], the bytes of a tensor of `shape`."""
    if not shape:
        return 0
    matrices, rows = shape[:2] if len(shape) > _MATRIX else (1, shape[0])
    mine, theirs = (tensor.reshape(matrices, rows, -1) for tensor in (live, wanted))
    for shift in (theirs == mine[:, :1]).all(dim=2).all(dim=0).nonzero().flatten().tolist():
        run = theirs[:, shift:]
        if shift and run.numel() >= _TELLING and torch.equal(mine[:, : run.shape[1]], run):
            return int(shift)
    return 0
