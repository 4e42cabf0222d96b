"""One expert at a time: memory for the parameters of a single expert of a module that stacks them."""

from dataclasses import replace

from workloads.loading.mapping import Destination
from workloads.loading.weights import Placement, Region, Weight, WeightModule


def expert_of(placement: Placement) -> int | None:
    """Which of the stacked experts a piece belongs to; None where it is not of a single one."""
    if not placement.stacked or placement.target[0][1] != 1:
        return None
    return placement.target[0][0]


def takes_single_experts(module: WeightModule) -> bool:
    """Whether every piece of the module is of one expert, and an expert can be installed by itself."""
    stacked = all(expert_of(p) is not None for weight in module.weights.values() for p in weight.placements)
    overrides = type(module).install_expert is not WeightModule.install_expert
    return stacked and (overrides or all(module.live(name) is not None for name in module.weights))


class ExpertSlice(WeightModule):
    """The parameters of `module` with expert `expert` alone, to be loaded and padded as the whole module is."""

    def __init__(self, module: WeightModule, expert: int) -> None:
        super().__init__()
        self._left = 0
        for name, weight in module.weights.items():
            own = tuple(_shifted(p) for p in weight.placements if expert_of(p) == expert)
            self._left += len(own)
            self.add_weight(name, Weight((1, *weight.shape[1:]), weight.dtype, own, weight.creation_value))

    @property
    def is_complete(self) -> bool:
        """Whether a destination has been asked for for every piece."""
        return self._left == 0

    def destination(self, of_module: Destination) -> Destination:
        """Where a piece of the whole module goes here; each is asked for once."""
        self._left -= 1
        return replace(of_module, module=self, placement=_shifted(of_module.placement))


def _shifted(placement: Placement) -> Placement:
    """The placement of an expert that is alone."""
    return replace(placement, target=_first(placement.target), slot=_first(placement.slot))


def _first(region: Region) -> Region:
    return ((0, region[0][1]), *region[1:])
