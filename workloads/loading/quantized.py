"""Block formats in which checkpoints store quantised matrices, by the name that a tensor table gives them."""

from collections.abc import Callable

import torch

from workloads.kernels.quantization import BLOCK, quantize_mxfp4

Pieces = dict[str, torch.Tensor]  # by the piece's name in the table


def _mxfp4(matrix: torch.Tensor) -> Pieces:
    """weight uint8 [..., rows, columns/2], low nibble first; scale uint8 [..., rows, columns/32], E8M0."""
    packed, scales = quantize_mxfp4(matrix)
    return {"weight": packed, "scale": scales}


def _mxfp4_blocks(matrix: torch.Tensor) -> Pieces:
    """As `mxfp4`, with the weight as gpt-oss stores it: uint8 [..., rows, columns/32, 16]."""
    pieces = _mxfp4(matrix)
    return {**pieces, "weight": torch.unflatten(pieces["weight"], -1, (-1, BLOCK // 2))}


# Each takes float32 [..., rows, columns].
FORMATS: dict[str, Callable[[torch.Tensor], Pieces]] = {"mxfp4": _mxfp4, "mxfp4_blocks": _mxfp4_blocks}
