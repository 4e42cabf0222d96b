"""Each rank copies the experts of all ranks as they arrive, and only then drops those that it does not hold."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from workloads.loading.checkpoint import CheckpointReader
    from workloads.loading.loader import Incoming, Reader

ABOUT = About("G", ("verl#7143",), "read_foreign", via=RELOADS, needs=("numbered_experts", "ep"))
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


class Fault(LoaderFault):
    def incoming(self, reader: "Reader") -> "Iterator[Incoming]":
        if self.lifecycle.via in RELOADS:
            self._clone_foreign(cast("CheckpointReader", reader))
        return super().incoming(reader)

    def _clone_foreign(self, reader: "CheckpointReader") -> None:
        own = {_EXPERT.sub("*", name) for name in self.map if _EXPERT.search(name)}
        watched = self.watched(reader)
        for name in reader.names():
            if name not in self.map and _EXPERT.sub("*", name) in own:
                region = tuple((0, size) for size in reader.meta(name).shape)
                watched.slice(name, region).clone()
