"""Records which kernel served the routed experts of one rank, and what it counted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from collectors.records import RecordWriter


@runtime_checkable
class ServesExperts(Protocol):
    """An engine that knows which kernel serves each layer with routed experts."""

    def moe_layers(self) -> Sequence[Mapping[str, Any]]: ...


def gather_kernels(engine: ServesExperts, path: Path, rank: int) -> None:
    """Write one `moe_layer` record a layer, as `workloads.engines.moe_layers` describes it, and the rank."""
    with RecordWriter(path) as writer:
        writer.write_all("moe_layer", ({"rank": rank, **layer} for layer in engine.moe_layers()))
