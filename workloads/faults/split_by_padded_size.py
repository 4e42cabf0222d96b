"""The expert-by-expert loader splits rows between ranks by their padded number, so that later ranks get fewer."""

from dataclasses import replace
from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workloads.loading.loader import Incoming, Reader
    from workloads.loading.mapping import Destination
    from workloads.loading.weights import Placement

ABOUT = About(
    "G",
    ("pull request that replaces vllm#50523",),
    "found_elsewhere",
    via=("per_expert",),
    needs=("kernel_object", "padding", "tp"),
)


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> "Iterator[Incoming]":
        whole = self.map
        if self.lifecycle.via == "per_expert":
            self.map = {source: [_moved(place) for place in places] for source, places in whole.items()}
        try:
            yield from super().incoming(reader)
        finally:
            self.map = whole


def _moved(place: "Destination") -> "Destination":
    group = getattr(place.module, "group", None)
    if not place.placement.stacked or not place.parameter.startswith("w13") or group is None:
        return place
    return replace(place, placement=_by_padded(place.placement, int(group.rank)))


def _by_padded(placement: "Placement", rank: int) -> "Placement":
    """Rows from `rank` times the padded number on, up to the last one that there is. Rank 0 begins right."""
    dim = len(placement.source_region) - len(placement.target) + 1
    dim = next(d for d in (dim, dim - 1, 0) if placement.source_region[d][1] == placement.target[1][1])
    (start, length), padded = placement.source_region[dim], placement.slot[1][1]
    fewer = max(0, start + length - rank * padded)
    if not rank or fewer >= length:
        return placement
    source = (*placement.source_region[:dim], (rank * padded, fewer), *placement.source_region[dim + 1 :])
    target = (placement.target[0], (placement.target[1][0], fewer), *placement.target[2:])
    return replace(placement, source_region=source, target=target)
