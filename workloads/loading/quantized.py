"""Block formats in which checkpoints store quantised matrices, by the name that a tensor table gives them."""

from collections.abc import Callable

import torch

from workloads.kernels.quantization import quantize_mxfp4

Pieces = dict[str, torch.Tensor]  # by the piece's name in the table


def _mxfp4(matrix: torch.Tensor) -> Pieces:
    """weight uint8 [..., rows, columns/2], low nibble first; scale uint8 [..., rows, columns/32], E8M0."""
    packed, scales = quantize_mxfp4(matrix)
    return {"weight": packed, "scale": scales}


# Each takes float32 [..., rows, columns].
FORMATS: dict[str, Callable[[torch.Tensor], Pieces]] = {"mxfp4": _mxfp4}
