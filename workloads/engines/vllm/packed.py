"""Reads back weights that a kernel of vLLM keeps in a form of its own, in the layout that they have in a checkpoint.

On CPU vLLM hands the weight of a linear layer to oneDNN, which packs it behind a raw pointer, and empties the
parameter. The kernel itself tells what it holds: multiplied by the identity it returns every weight unchanged, since
each output is one product with 1 and sums of zeros. Only the sign of a zero is lost.

Experts on CPU stay in their parameters, in the order in which the grouped kernel reads them. Where that kernel looks
for an element its own packing tells, given consecutive numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

HANDLER = "CPUDNNLGEMMHandler"
EXPERTS_KERNEL = "CPUUnquantizedExperts"
EXPERTS = ("w13_weight", "w2_weight")
EXACT_IN_FLOAT32 = 1 << 24  # numbers below it
ROWS_AT_ONCE = 512  # of the identity
STEP = ".<packed>"


def packed_weights(roots: Mapping[str, nn.Module]) -> dict[str, Callable[[], Tensor]]:
    """By path, calls that return what each kernel holds: a weight [n, k], or those of all local experts [e, n, k]."""
    found: dict[str, Callable[[], Tensor]] = {}
    for root, model in roots.items():
        for path, cell, dtype in handlers(root, model):
            found[path] = partial(read_back, cell.cell_contents, dtype)
        for name, module in model.named_modules():
            kernel = _experts_kernel(module)
            for weight in EXPERTS if kernel is not None else ():
                found[f"{root}:{name}.{weight}{STEP}"] = partial(unpack, getattr(module, weight), kernel.isa)
    return found


def _experts_kernel(module: nn.Module) -> Any:
    """The kernel object of a module with packed experts, None of any other."""
    method = vars(module).get("quant_method") or module._modules.get("quant_method")
    kernel = getattr(getattr(getattr(method, "moe_kernel", None), "impl", None), "fused_experts", None)
    packs = type(kernel).__name__ == EXPERTS_KERNEL and not getattr(kernel, "_use_zentorch", False)
    return kernel if packs else None


def unpack(packed: Tensor, isa: str) -> Tensor:
    """[e, n, k]: experts in rows, from what the kernel for `isa` reads. Zeros become positive, as `read_back` has them.

    Raises ValueError for an expert with more elements than float32 can number.
    """
    _, n, k = packed.shape
    if n * k >= EXACT_IN_FLOAT32:
        raise ValueError(f"An expert of {n} x {k} elements has too many to be numbered in float32.")
    numbers = torch.arange(n * k, dtype=torch.float32).view(1, n, k)
    places = torch.empty_like(numbers)
    torch.ops._C.prepack_moe_weight(numbers, places, isa)
    order = torch.empty(n * k, dtype=torch.int64)
    order[places.view(-1).long()] = torch.arange(n * k)
    return packed.detach().reshape(len(packed), n * k)[:, order].view_as(packed) + 0.0


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
    return weight.t().contiguous()  # once, for all that hash it
