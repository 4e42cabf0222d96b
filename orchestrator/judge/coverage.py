"""How many of the bytes that the checkpoint put on the ranks an observation audited."""

from dataclasses import dataclass, field

from orchestrator.judge.records import Audit


@dataclass
class Coverage:
    """Totals of one observation over all ranks and roots, bytes."""

    expected: int = 0
    audited: int = 0
    vacuous: int = 0
    unclassified: int = 0
    unreachable: int = 0
    silent_ranks: int = 0  # ranks without totals
    missing: dict[str, int] = field(default_factory=dict)  # path of what is not covered -> a rank of which

    @property
    def fraction(self) -> float:
        return self.audited / self.expected if self.expected else 0.0

    def add(self, audit: Audit) -> None:
        self.silent_ranks += not any(s["bytes_expected"] for s in audit.sources)
        for source in audit.sources:
            self.expected += source["bytes_expected"]
            self.audited += source["bytes_audited"]
            names = (f"{source['root']}:{name}" for name in source.get("missing", ()))
            self.missing.update(dict.fromkeys(names, audit.rank))
        self.unreachable += len(audit.unreachable)
        self.vacuous += audit.vacuous
        self.unclassified += len(audit.unclassified)
