"""What happened to each model's weights, in order: the events that the judge checks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from workloads import heartbeat


class EventSink(Protocol):
    def write(self, kind: str, record: dict[str, Any]) -> None: ...
    def sync(self) -> None: ...


class Lifecycle:
    """Numbers the loads of one process and tells each event with the phase in which it happened.

    Records: {"kind": "event", "root", "load", "event", "via", "phase", "module"}; event is one of
    load_start, fill_padding, post_process, finalize, load_end, or read_foreign where the load reads a tensor that this
    rank keeps nothing of; phase is load or forward.
    """

    def __init__(self, sink: EventSink | None = None) -> None:
        self._sink = sink
        self._phase = "load"
        self._load = -1
        self.via = ""
        self.events: list[dict[str, Any]] = []

    def start_load(self, via: str) -> None:
        """A new load of every root begins."""
        self._load += 1
        self.via = via

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Everything inside happens while the model serves."""
        before, self._phase = self._phase, "forward"
        try:
            yield
        finally:
            self._phase = before

    def record(self, root: str, event: str, module: str = "") -> None:
        entry = {
            "root": root,
            "load": self._load,
            "event": event,
            "via": self.via,
            "phase": self._phase,
            "module": module,
        }
        self.events.append(entry)
        heartbeat.advance()
        if self._sink is not None:
            self._sink.write("event", entry)
            if event in ("load_end", "finalize"):
                self._sink.sync()
