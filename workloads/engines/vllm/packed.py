"""Reads back weights that a kernel of vLLM keeps in memory of its own, where no tensor shows them.

On CPU vLLM hands the weight of a linear layer to oneDNN, which packs it behind a raw pointer, and empties the
parameter. The kernel itself tells what it holds: multiplied by the identity it returns every weight unchanged, since
each output is one product with 1 and sums of zeros. Only the sign of a zero is lost.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

HANDLER = "CPUDNNLGEMMHandler"
ROWS_AT_ONCE = 512  # of the identity
STEP = ".<packed>"


def packed_weights(roots: Mapping[str, nn.Module]) -> dict[str, Callable[[], Tensor]]:
    """By path, calls that return the weight [n, k] of each kernel, in the layout it has in a checkpoint."""
    return {
        path: partial(read_back, cell.cell_contents, dtype)
        for root, model in roots.items()
        for path, cell, dtype in handlers(root, model)
    }


def handlers(root: str, model: nn.Module) -> Iterator[tuple[str, CellType, torch.dtype]]:
    """(path, closure cell, dtype of the weight) of every kernel object that a module's own functions hold.

    The path is what `collectors.walk` calls the object, and STEP.
    """
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not isinstance(value, FunctionType):
                continue
            for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if type(cell.cell_contents).__name__ == HANDLER:
                    place = f"{name}.{attribute}" if name else attribute
                    yield f"{root}:{place}.<closure {variable}>{STEP}", cell, module.weight.dtype


def read_back(handler: Any, dtype: torch.dtype) -> Tensor:
    """[n, k]: what the kernel multiplies by."""
    k, n = int(handler.k), int(handler.n)
    weight = torch.empty((k, n), dtype=dtype)
    identity = torch.zeros((min(k, ROWS_AT_ONCE), k), dtype=dtype)
    for start in range(0, k, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, k - start)
        ones = torch.arange(rows)
        identity[ones, start + ones] = 1
        torch.ops._C.onednn_mm(weight[start : start + rows], identity[:rows], None, handler.handler_tensor)
        identity[ones, start + ones] = 0
    return weight.t()
