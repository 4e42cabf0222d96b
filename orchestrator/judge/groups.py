"""All causes of one kind in one module group: what becomes one finding."""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from orchestrator.judge.diagnose import Cause
from orchestrator.judge.lifecycle import Violation

UNREACHABLE = "unreachable"  # root of the paths of storages that a forward read and no walk reaches
SHOWN = 5  # names kept of a group
_EXAMPLES = 3

Member = tuple[int, str]  # rank, path


@dataclass
class Group:
    """All causes of one kind in one module group of one observation."""

    code: str
    arm: str
    observation: str
    name: str
    members: set[Member] = field(default_factory=set)
    ranks: Counter[int] = field(default_factory=Counter)
    slices: set[Member] = field(default_factory=set)  # members of which a checkpoint slice is concerned
    parts: dict[str, None] = field(default_factory=dict)
    examples: list[Cause] = field(default_factory=list)
    checks: dict[str, None] = field(default_factory=dict)
    violation: Violation | None = None
    groups: int = 1
    consequences: list["Group"] = field(default_factory=list)
    explained: set[Member] = field(default_factory=set)  # members of the consequences

    def fold(self, other: "Group") -> None:
        """Takes in a group that follows from this one."""
        self.consequences.append(other)
        self.explained |= other.members

    def add(self, cause: Cause, check: str) -> None:
        member = (cause.rank, cause.path)
        if member not in self.members:
            self.members.add(member)
            self.ranks[cause.rank] += 1
        if cause.part:
            self.slices.add(member)
            if len(self.parts) < SHOWN:
                self.parts[cause.part] = None
        if len(self.examples) < _EXAMPLES and cause not in self.examples:
            self.examples.append(cause)
        self.checks[check] = None

    def absorb(self, other: "Group") -> None:
        """Becomes the same cause in one more module group."""
        self.members |= other.members
        self.ranks.update(other.ranks)
        self.checks.update(other.checks)
        self.consequences += other.consequences
        self.groups += other.groups


_INDEX = re.compile(r"(?<=[.\[])\d+(?=[.\]]|$)")


@lru_cache(maxsize=65536)
def module_group(path: str) -> str:
    """`target:model.layers.3.self_attn.o_norm.weight` -> `target:model.layers.*.self_attn`.

    Numbers become `*`, and what follows the child of a numbered layer is dropped.
    """
    root, _, rest = path.rpartition(":")
    names = _INDEX.sub("*", rest).split(".")
    if "*" in names:
        names = names[: names.index("*") + 2]
    elif len(names) > 1:
        names = names[:-1]
    return f"{root}:{'.'.join(names)}" if root else ".".join(names)
