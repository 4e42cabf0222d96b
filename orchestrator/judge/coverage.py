"""How many of the bytes that the checkpoint put on the ranks an observation audited.

An engine that knows which slices each rank owes gives totals. Of one that does not, each rank says what its
tensors hold (a `shared` source), and the ranks of a group that holds one whole model are counted together.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from orchestrator.judge.boxes import Box, is_whole, union_volume
from orchestrator.judge.records import Audit, Record

SHOWN = 5  # names kept of what is not covered, and reasons of what is not owed


@dataclass
class Coverage:
    """Totals of one observation over all ranks and roots, bytes.

    group: contiguous ranks that hold one model between them. loaded: whether a checkpoint was loaded at all; of a start
    on random weights an engine that is searched by content holds nothing, and owes nothing.
    missing: path of what is not (wholly) covered -> a rank of which. reasons: why, where a rank said so.
    excused: path of what is not owed -> its bytes, once; excuses: why.
    """

    group: int = 1
    loaded: bool = True
    expected: int = 0
    audited: int = 0
    vacuous: int = 0
    unclassified: int = 0
    unreachable: int = 0
    unheld: set[str] = field(default_factory=set)  # tensors that no pipeline stages hold whole
    silent_ranks: int = 0  # ranks without totals
    missing: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    excused: dict[str, int] = field(default_factory=dict)
    excuses: dict[str, str] = field(default_factory=dict)
    _open: dict[str, "_Shared"] = field(default_factory=dict, repr=False)  # by root, of the group being read
    _at: int = 0  # number of that group

    @property
    def fraction(self) -> float:
        if not self.owes:
            return 1.0
        return self.audited / self.expected if self.expected else 0.0

    @property
    def owes(self) -> bool:
        """Whether there is anything to cover."""
        return self.loaded or self.expected > 0

    def add(self, audit: Audit) -> None:
        """Ranks come in order; after the last one, `finish`."""
        if audit.rank // self.group != self._at:
            self.finish()
            self._at = audit.rank // self.group
        self.silent_ranks += not any(s["bytes_expected"] for s in audit.sources)
        for source in audit.sources:
            if source.get("shared"):
                if self.loaded:
                    owner: str = (
                        source["of"] if "of" in source else source["root"]
                    )  # a draft's may be its target
                    self._open.setdefault(owner, _Shared(audit.rank)).add(source)
                continue
            self.expected += source["bytes_expected"]
            self.audited += source["bytes_audited"]
            names = (f"{source['root']}:{name}" for name in source.get("missing", ()))
            self.missing.update(dict.fromkeys(names, audit.rank))
        self.unreachable += len(audit.unreachable)
        self.vacuous += audit.vacuous
        self.unclassified += len(audit.unclassified)

    def add_unheld(self, name: str, missing: int, size: int) -> None:
        """A tensor of which `missing` bytes of `size` are on no rank of any pipeline stage."""
        self.unheld.add(name)
        self.expected += missing
        self.missing[name] = 0
        self.reasons[name] = f"no pipeline stage holds {missing:,} of its {size:,} bytes"

    def finish(self) -> None:
        """Counts the shared sources of the group that was read last."""
        for root, shared in self._open.items():
            self._count(root, shared)
        self._open = {}

    def _count(self, root: str, shared: "_Shared") -> None:
        for name, reason in shared.excused.items():
            shape, itemsize = shared.tensors.pop(name, ([0], 0))  # 0 bytes where a rank gives no size
            self.excused[f"{root}:{name}"] = math.prod(shape) * itemsize
            self.excuses[f"{root}:{name}"] = reason
        for name, (shape, itemsize) in shared.tensors.items():
            path, size = f"{root}:{name}", math.prod(shape) * itemsize
            held = size if name in shared.whole else shared.volume(name, shape) * itemsize
            self.expected += size
            self.audited += held
            if held < size:
                self.missing.setdefault(path, shared.first_rank)
                part = f"{held:,} of its {size:,} bytes are held" if held else "no audited tensor holds it"
                self.reasons.setdefault(
                    path, "; ".join(filter(None, (part, shared.reasons.get(name, "").rstrip("."))))
                )

    def totals(self) -> dict[str, Any]:
        """Numbers as result.json holds them."""
        return {
            "fraction": self.fraction,
            "bytes": self.audited,
            "expected": self.expected,
            "vacuous": self.vacuous,
            "unclassified": self.unclassified,
            "unreachable": self.unreachable,
            "excused": len(self.excused),
            "excused_bytes": sum(self.excused.values()),
        }

    def shown_missing(self) -> list[str]:
        return list(self.missing)[:SHOWN]

    def left_out(self) -> str:
        """What is not covered and what is not owed, to follow the totals in a sentence; "" where that is nothing."""
        names = [
            f"`{m}`" + (f" ({self.reasons[m]})" if m in self.reasons else "") for m in self.shown_missing()
        ]
        more = f" and {len(self.missing) - SHOWN} more" if len(self.missing) > SHOWN else ""
        text = f"; not covered: {', '.join(names)}{more}" if names else ""
        if self.excused:
            count, size = len(self.excused), sum(self.excused.values())
            first = next(iter(self.excuses.values()))
            text += f"; {count} tensor{'s' if count > 1 else ''} of {size:,} bytes not owed, e.g. {first}"
        return text

    def shown_reasons(self) -> dict[str, str]:
        """Why the names shown are not covered, then the first of those that are not owed, each reason once."""
        found = {name: self.reasons[name] for name in self.shown_missing() if name in self.reasons}
        first = {reason: path for path, reason in reversed(self.excuses.items())}
        kept = list(self.excuses)
        for path in sorted(first.values(), key=kept.index)[:SHOWN]:
            found[path] = self.excuses[path]
        return found


class _Shared:
    """What the ranks of one group hold of one root's checkpoint. tensors: shape and bytes per element by name;
    whole: names that some rank holds entirely; excused: only what every rank excuses."""

    def __init__(self, first_rank: int) -> None:
        self.first_rank = first_rank
        self.tensors: dict[str, tuple[list[int], int]] = {}
        self.whole: set[str] = set()
        self.excused: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self._boxes: dict[str, list[Box]] = {}
        self._ranks = 0

    def add(self, source: Record) -> None:
        excused = source.get("excused", {})
        kept = excused if not self._ranks else {n: r for n, r in self.excused.items() if n in excused}
        self.excused = dict(kept)
        self._ranks += 1
        self.tensors.update(source["tensors"])
        for name, reason in source.get("reasons", {}).items():
            self.reasons.setdefault(name, reason)
        for name, boxes in source["regions"].items():
            if name in self.whole or name not in self.tensors:
                continue
            shape = self.tensors[name][0]
            if any(is_whole(box, shape) for box in boxes):
                self.whole.add(name)
            else:
                self._boxes.setdefault(name, []).extend(boxes)

    def volume(self, name: str, shape: list[int]) -> int:
        return union_volume(self._boxes.get(name, ()), shape)
