"""Padding: recorded while a load places weights, filled once before post-processing.

On a GPU the regions of one module are filled by a few launches, and those of all modules of a load that fills them
inside `filled_together`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from workloads.kernels.regions import Regions, write
from workloads.loading.weights import Placement, Region, WeightModule, narrow

_together: ContextVar[dict[torch.device, Regions] | None] = ContextVar("together", default=None)


def record_padding(module: WeightModule, name: str, placement: Placement) -> None:
    """Record what `placement` leaves of its slot in parameter `name`.

    Only the latest load counts: two loaders may split a parameter differently, so the first record
    after a fill starts the module's records over, lest an old region cover real rows.
    """
    if module.padding_filled:
        module.padding_regions = {}
        module.padding_filled = False
    weight = module.weights[name]
    parameter = module.live(name)
    if parameter is None:
        raise RuntimeError(f"Parameter {name!r} was consumed; restore it before loading into it.")
    for box in placement.padding(parameter.shape):
        if weight.creation_value is None:
            raise RuntimeError(f"Parameter {name!r} has padding but no creation value to fill it with.")
        module.padding_regions.setdefault(name, {})[box] = weight.creation_value


@contextmanager
def filled_together() -> Iterator[None]:
    """What `fill_padding` fills on a GPU inside is written when the block is left without an error."""
    waiting: dict[torch.device, Regions] = {}
    token = _together.set(waiting)
    try:
        yield
    finally:
        _together.reset(token)
    for regions in waiting.values():
        write(regions.plan())


def fill_padding(module: WeightModule) -> int:
    """Write the recorded regions and return how many there were.

    Must run before post-processing: afterwards the bytes are in the kernel's layout.
    """
    waiting = _together.get()
    gathered: dict[torch.device, Regions] = {} if waiting is None else waiting
    count = 0
    for name, boxes in module.padding_regions.items():
        parameter = module.live(name)
        if parameter is None or tuple(parameter.shape) != module.weights[name].shape:
            raise RuntimeError(
                f"Padding of {name!r} was recorded for shape {module.weights[name].shape}, but the parameter is "
                "consumed or has another layout: fill padding before post-processing."
            )
        _fill(parameter, boxes, gathered)
        count += len(boxes)
    if waiting is None:
        for regions in gathered.values():
            write(regions.plan())
    module.padding_filled = True
    return count


def _fill(
    parameter: torch.Tensor, boxes: Mapping[Region, float], gathered: dict[torch.device, Regions]
) -> None:
    """One strided fill each on a CPU; on a GPU a launch for each would cost more than its bytes."""
    if on_gpu(parameter):
        regions = gathered.setdefault(parameter.device, Regions(parameter.device))
        regions.fill(parameter, list(boxes), list(boxes.values()))
        return
    for box, value in boxes.items():
        narrow(parameter, box).fill_(value)


def on_gpu(parameter: torch.Tensor) -> bool:
    return parameter.is_cuda
