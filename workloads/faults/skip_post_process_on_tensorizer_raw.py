"""A raw tensorizer file is loaded and nothing post-processed, so the first forward meets the checkpoint's layout."""

from typing import TYPE_CHECKING

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

if TYPE_CHECKING:
    from workloads.loading.weights import WeightModule

ABOUT = About("J", ("vllm#55318",), CRASH, via=("tensorizer_raw",), without={"processed": "skipped_hook"})


class Fault(LoaderFault):
    def post_process(self, path: str, module: "WeightModule") -> None:
        if self.lifecycle.via != "tensorizer_raw":
            super().post_process(path, module)
