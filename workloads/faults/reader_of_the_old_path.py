"""A reload goes on reading the checkpoint that the engine was started on."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.lifecycle import Lifecycle
    from workloads.loading.loader import Incoming, Reader
    from workloads.loading.weights import ModelRoot

ABOUT = About("H", ("vllm#32718",), "stale", via=RELOADS, needs=("safetensors",))


class Fault(LoaderFault):
    def __init__(self, name: str, root: "ModelRoot", lifecycle: "Lifecycle") -> None:
        super().__init__(name, root, lifecycle)
        self._first: Reader | None = None

    def incoming(self, reader: "Reader") -> Iterator["Incoming"]:
        self._first = self._first or reader
        return super().incoming(self._first)
