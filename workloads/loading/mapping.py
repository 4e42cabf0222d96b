"""From checkpoint names to the parameters of this rank."""

from dataclasses import dataclass

from workloads.loading.weights import ModelRoot, Placement, WeightModule


@dataclass(frozen=True)
class Destination:
    path: str
    module: WeightModule
    parameter: str
    placement: Placement


def destinations(root: ModelRoot) -> dict[str, list[Destination]]:
    """Checkpoint tensor -> every place of this rank that takes a piece of it, in declaration order."""
    found: dict[str, list[Destination]] = {}
    for path, module in root.weight_modules():
        for parameter, weight in module.weights.items():
            for placement in weight.placements:
                found.setdefault(placement.source, []).append(Destination(path, module, parameter, placement))
    return found
