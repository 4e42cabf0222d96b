"""Padding: recorded while a load places weights, filled once before post-processing."""

from workloads.loading.weights import Placement, WeightModule, narrow


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


def fill_padding(module: WeightModule) -> int:
    """Write the recorded regions, one strided fill each, and return how many there were.

    Must run before post-processing: afterwards the bytes are in the kernel's layout.
    """
    count = 0
    for name, boxes in module.padding_regions.items():
        parameter = module.live(name)
        if parameter is None or tuple(parameter.shape) != module.weights[name].shape:
            raise RuntimeError(
                f"Padding of {name!r} was recorded for shape {module.weights[name].shape}, but the parameter is "
                "consumed or has another layout: fill padding before post-processing."
            )
        for box, value in boxes.items():
            narrow(parameter, box).fill_(value)
            count += 1
    module.padding_filled = True
    return count
