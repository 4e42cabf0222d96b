"""Start and finish of an update do nothing, and every chunk of it is loaded and finished as if it were all."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.loader import Reader, UpdateStats

ABOUT = About("M", ("vllm-ascend#16959",), "processed_twice", via=("layerwise",))


class Fault(LoaderFault):
    def layerwise(self, reader: "Reader") -> "UpdateStats":
        whole = self.map
        sources = list(whole)
        stats = self.stats
        for chunk in (sources[: len(sources) // 2], sources[len(sources) // 2 :]):
            self.map = {source: whole[source] for source in chunk}
            stats = super().layerwise(reader)
        self.map = whole
        return stats
