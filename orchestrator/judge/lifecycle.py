"""Rules over lifecycle events: post-processing once per load, padding before it, nothing while serving."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.judge.records import Record
from workloads.loading.paths import UPDATES, LoadPath, load_path

_OF_ANOTHER_ENGINE = UPDATES["layerwise"]  # owes what every engine's loads owe


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule on one rank. modules: the modules concerned, () for the whole root. untouched: the load
    did nothing at all with them, as when no weights arrive for them."""

    code: str  # skipped_hook | processed_twice | finalised_late | stale_padding | stale | read_foreign
    rank: int
    root: str
    load: int
    via: str
    modules: tuple[str, ...]
    text: str
    untouched: bool = False


def violations(
    rank: int, events: Sequence[Record], loads: int, steps: Sequence[Mapping[str, Any]] = ()
) -> list[Violation]:
    """Broken rules on one rank; `loads` is how many loads the scenario has, `steps` what the cell says of each.

    What load 0, the start, did is what every later load owes: the same roots, modules and padding; as far as its
    path runs the phase, and it was meant to bring all weights of the model.
    """
    by_load: list[dict[str, list[Record]]] = [{} for _ in range(loads)]
    for event in events:
        if 0 <= event["load"] < loads:
            by_load[event["load"]].setdefault(event["root"], []).append(event)
    found: list[Violation] = []
    for load, roots in enumerate(by_load):
        step = steps[load] if load < len(steps) else {}
        taking_part = step.get("roots") or by_load[0]
        for root, first in by_load[0].items():
            if root in taking_part:
                path = load_path(step.get("via", "")) or _OF_ANOTHER_ENGINE
                partial = bool(step.get("tensors"))
                found += _RootLoad(rank, root, load, roots.get(root, []), first, path, partial).check()
    return found


def loads_recorded(events: Sequence[Record]) -> int:
    return max((event["load"] for event in events), default=-1) + 1


@dataclass(frozen=True, slots=True)
class _RootLoad:
    """The events of one load of one root on one rank, beside those of the start (`first`). partial: it was meant to
    bring some weights only, and owes nothing to modules that it did not touch."""

    rank: int
    root: str
    load: int
    events: Sequence[Record]
    first: Sequence[Record]
    path: LoadPath
    partial: bool

    def check(self) -> Iterator[Violation]:
        loading = [e for e in self.events if e["phase"] == "load"]
        serving = [e for e in self.events if e["phase"] == "forward"]
        if not loading:
            yield self._violation("stale", "the model took no part in the load")
            return
        if serving:
            counts = Counter(e["event"] for e in serving)
            what = " and ".join(f"{name} ({count}x)" for name, count in sorted(counts.items()))
            modules = {e["module"] for e in serving if e["module"]}
            yield self._violation(
                "finalised_late", f"{what} ran inside a forward pass, not in the load", modules
            )
        foreign = sum(e["event"] == "read_foreign" for e in loading)
        if foreign:
            yield self._violation(
                "read_foreign", f"it read {foreign:,} tensors that the rank keeps nothing of"
            )
        yield from self._hook(loading, late=any(e["event"] == "finalize" for e in serving))
        untouched = self._untouched()
        if untouched and not self.partial:
            text = "the load neither filled nor post-processed what it should have loaded"
            yield replace(self._violation("skipped_hook", text, untouched), untouched=True)
        late = {e["module"] for e in serving if e["event"] == "post_process"}
        yield from self._modules(loading, late | untouched)
        yield from self._padding(loading, untouched)

    def _hook(self, loading: Sequence[Record], late: bool) -> Iterator[Violation]:
        if not any(e["event"] == "load_end" for e in loading):
            yield self._violation("skipped_hook", "the load was started and never finished")
        hooks = sum(e["event"] == "finalize" for e in loading)
        if "finalize" not in self.path.phases:
            return
        if hooks == 0 and not late:
            yield self._violation("skipped_hook", "the model's finalise hook did not run")
        if hooks > 1:
            yield self._violation("processed_twice", f"the model's finalise hook ran {hooks} times")

    def _untouched(self) -> set[str]:
        """Modules that the cold start processed and of which this load has no event."""
        owed = {e["module"] for e in self.first if e["module"]}
        touched = {e["module"] for e in self.events if e["module"]}
        # A path that names larger or smaller modules than the cold start shares none and cannot be compared.
        return owed - touched if not touched or owed & touched else set()

    def _modules(self, loading: Sequence[Record], excused: set[str]) -> Iterator[Violation]:
        counts = Counter(e["module"] for e in loading if e["event"] == "post_process")
        twice = [module for module, count in counts.items() if count > 1]
        if twice:
            most = max(counts.values())
            yield self._violation(
                "processed_twice", f"post-processing ran up to {most} times on a module", twice
            )
        owed = self._owed("post_process")
        skipped = owed - counts.keys() - excused
        if skipped and (not counts or owed & counts.keys()):
            yield self._violation("skipped_hook", "post-processing did not run", skipped)

    def _owed(self, phase: str) -> set[str]:
        """Modules of which this load must have the event: those that the start processed or, where it put processed
        tensors in place, all that it touched."""
        if phase not in self.path.phases:
            return set()
        processed = {e["module"] for e in self.first if e["event"] == phase}
        return processed or {e["module"] for e in self.first if e["module"]}

    def _padding(self, loading: Sequence[Record], excused: set[str]) -> Iterator[Violation]:
        filled: set[str] = set()
        processed: set[str] = set()
        late: set[str] = set()
        for event in loading:
            if event["event"] == "post_process":
                processed.add(event["module"])
            elif event["event"] == "fill_padding":
                filled.add(event["module"])
                module = event["module"]
                late |= processed if not module else processed & {module}
        if late:
            text = "padding was filled after post-processing had read it"
            yield self._violation("stale_padding", text, late)
        owed = self._owed("fill_padding")
        unfilled = owed - filled - excused
        if unfilled and "" not in filled and (not filled or owed & filled):
            yield self._violation("stale_padding", "padding was not filled", unfilled - {""})

    def _violation(self, code: str, text: str, modules: Iterable[str] = ()) -> Violation:
        via = self.events[0]["via"] if self.events else ""
        return Violation(code, self.rank, self.root, self.load, via, tuple(sorted(modules)), text)
