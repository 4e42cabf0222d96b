"""Gathers causes into findings: one per cause and module group, most specific first, consequences folded."""

from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.judge.diagnose import Cause
from orchestrator.judge.groups import SHOWN, UNREACHABLE, Group, Member, module_group
from orchestrator.judge.lifecycle import Violation
from orchestrator.judge.sentences import sentence

#: From the mechanism to the mere symptom; a later one about the same tensors is a consequence of an earlier.
ORDER = (
    "finalised_late", "processed_twice", "skipped_hook",
    "numeric_cast", "wrong_padding_value", "overwritten_by_padding", "stale_padding", "found_elsewhere", "wrong_layout",
    "uninitialised", "stale", "moved",
    "alias_broken", "dtype", "layout", "unheld", "missing", "extra", "vacuous", "unclassified",
    "invalid_ids", "replicas_differ", "checkpoint_mismatch", "wrong_derived", "differs", "not_changed", "stale_cache",
    "generation_differs", "read_foreign",
)  # fmt: skip
_RANK_OF = {code: place for place, code in enumerate(ORDER)}

#: What a broken load leaves behind in the tensors of the modules that it broke.
_AFTERMATH = frozenset(ORDER) - {
    "moved",
    "numeric_cast",
    "wrong_padding_value",
    "finalised_late",
    "processed_twice",
}
#: Symptoms: about tensors whose cause is known already they add nothing, in later observations either.
_SYMPTOMS = {"replicas_differ", "wrong_derived", "differs", "not_changed"}
_ANSWERS = {
    "stale_cache",
    "generation_differs",
}  # wrong answers follow from anything that is wrong in the weights
_PADDING = {"stale_padding", "wrong_padding_value", "uninitialised"}
_MAX_GROUPS = 4  # of one cause; above, they become one finding


class Ledger:
    """Collects causes while ranks are judged one after another."""

    def __init__(self, observations: Sequence[str]) -> None:
        self._order = {name: place for place, name in enumerate(observations)}
        self._groups: dict[tuple[str, ...], Group] = {}

    def add(self, arm: str, observation: str, check: str, causes: Iterable[Cause]) -> None:
        for cause in causes:
            self._group(cause.code, arm, observation, module_group(cause.path)).add(cause, check)

    def add_violation(self, arm: str, observation: str, check: str, violation: Violation) -> None:
        """A broken lifecycle rule; the same one on several ranks is one finding."""
        v = violation
        group = self._group(v.code, arm, observation, v.text)
        group.violation = group.violation or v
        for module in v.modules or ("",):
            group.add(Cause(v.code, v.rank, f"{v.root}:{module}", note=v.text), check)

    def _group(self, code: str, arm: str, observation: str, name: str) -> Group:
        key = (code, arm, observation, name)
        if key not in self._groups:
            self._groups[key] = Group(code, arm, observation, name)
        return self._groups[key]

    def findings(self) -> list[dict[str, Any]]:
        """Findings as result.json holds them, the primary one first, the candidate's before the base's."""
        kept: list[Group] = []
        unreached = _unreached(self._groups.values())
        for group in sorted(self._groups.values(), key=self._sort_key):
            parent = self._cause_of(group, kept)
            if id(group) in unreached:
                unreached[id(group)].fold(group)
            elif parent is None:
                kept.append(group)
            else:
                parent.fold(group)
        return [self._finding(group) for group in _merged(kept)]

    def _sort_key(self, group: Group) -> tuple[Any, ...]:
        return (
            group.arm != "candidate", _RANK_OF[group.code], group.violation is None,
            self._order.get(group.observation, 0), not group.name.startswith("target"), -len(group.members), group.name,
        )  # fmt: skip

    def _cause_of(self, group: Group, kept: Sequence[Group]) -> Group | None:
        """The earlier, more specific group that explains this one."""
        seen: set[Member] = set()
        nearest, overlap = None, 0
        for other in kept:
            if other.arm != group.arm or self._later(other, group):
                continue
            if group.code in _ANSWERS:
                return other
            if other.violation is not None:
                if _explains(other, group):
                    return other
            elif _derives_from(other, group) or _left_by_move(other, group):
                return other
            elif _same_matter(other, group):
                known = group.members & (other.members | other.explained)
                common = len(known)
                seen |= known
                if common > overlap:
                    nearest, overlap = other, common
        return nearest if group.members <= seen else None

    def _later(self, other: Group, group: Group) -> bool:
        """Whether `other` was seen only after `group`, and so cannot be its cause."""
        return self._order.get(other.observation, 0) > self._order.get(group.observation, 0)

    def _finding(self, group: Group) -> dict[str, Any]:
        example = group.examples[0]
        return {
            "code": group.code,
            "arm": group.arm,
            "observation": group.observation,
            "rank": min(group.ranks),
            "path": example.path.rstrip(":"),  # of a whole model: its name
            "detail": sentence(group),
            "count": len(group.members),
            "ranks": sorted(group.ranks),
            "paths": sorted({path.rstrip(":") for _, path in group.members})[:SHOWN],
            "parts": list(group.parts),
            "checks": list(group.checks),
            "consequences": _consequences(group),
        }


def _unreached(groups: Iterable[Group]) -> dict[int, Group]:
    """Lifecycle groups (by identity) that are consequences, each with its cause: modules that were not processed
    because no new weights reached them. Once found, it also explains the same in later loads, where the old
    weights may even be right."""
    causes: dict[tuple[str, Member], Group] = {}  # (arm, module on a rank) -> weights in it that were left
    skipped = [g for g in groups if g.violation and g.violation.untouched]
    left = [g for g in groups if g.code in ("stale", "uninitialised") and g.slices]
    for group in skipped:
        for rank, module in group.members:
            for other in left:
                same = other.arm == group.arm and other.observation == group.observation
                if same and any(r == rank and path.startswith(f"{module}.") for r, path in other.slices):
                    causes[group.arm, (rank, module)] = other
    return {
        id(g): causes[g.arm, next(iter(g.members))]
        for g in skipped
        if all((g.arm, member) in causes for member in g.members)
    }


def _same_matter(other: Group, group: Group) -> bool:
    """Whether `group` may be a mere consequence of `other` where both name the same tensors."""
    if group.violation is not None:
        return False
    if "moved" in (group.code, other.code):  # addresses explain no bytes, and bytes no addresses
        return group.code == other.code
    return other.code == group.code or other.observation == group.observation or group.code in _SYMPTOMS


def _derives_from(other: Group, group: Group) -> bool:
    """Whether tensors without checkpoint slices differ for no reason of their own where, in the same modules and
    ranks, weights are wrong: what is built from wrong weights is wrong."""
    same_place = (other.name, other.observation) == (group.name, group.observation)
    return (
        group.code == "differs" and same_place and not group.slices and group.ranks.keys() <= _weighty(other)
    )


def _left_by_move(other: Group, group: Group) -> bool:
    """Whether storages out of reach are those that moved tensors left, and that a graph still reads."""
    is_out_of_reach = group.code == "unclassified" and group.name.startswith(f"{UNREACHABLE}:")
    return is_out_of_reach and other.code == "moved" and group.ranks.keys() <= other.ranks.keys()


def _weighty(group: Group) -> set[int]:
    """Ranks on which a group concerns checkpoint slices."""
    return {rank for rank, _ in group.slices}


def _explains(other: Group, group: Group) -> bool:
    """Whether a broken load explains wrong tensors of its model, in the modules that it broke."""
    if group.violation is not None:  # the same rule, broken again by a later load
        return (other.code, other.name) == (group.code, group.name)
    allowed = _PADDING if other.code == "stale_padding" else _AFTERMATH
    if group.code not in allowed:
        return False
    # A member is `target:` for the whole model, or `target:module`.
    prefixes = tuple(path if path.endswith(":") else f"{path}." for _, path in other.members)
    return all(path.startswith(prefixes) for _, path in group.members)


def _merged(kept: Sequence[Group]) -> list[Group]:
    """Kept groups in order, those of one cause made one where there are many."""
    same: dict[tuple[Any, ...], list[Group]] = {}
    for group in kept:
        key = (group.arm, group.code, group.observation, group.violation is None)
        same.setdefault(key, []).append(group)
    merged = []
    for groups in same.values():
        if len(groups) > _MAX_GROUPS:
            for other in groups[1:]:
                groups[0].absorb(other)
            groups = groups[:1]
        merged += groups
    return merged


def _consequences(group: Group) -> list[dict[str, Any]]:
    """Folded groups, counted by code and observation: [{code, observation, count, ranks, path}]."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    waiting = list(group.consequences)
    while waiting:
        folded = waiting.pop(0)
        waiting += folded.consequences
        entry = found.setdefault(
            (folded.code, folded.observation),
            {
                "code": folded.code,
                "observation": folded.observation,
                "count": 0,
                "ranks": [],
                "path": folded.examples[0].path.rstrip(":"),
            },
        )
        entry["count"] += len(folded.members)
        entry["ranks"] = sorted({*entry["ranks"], *folded.ranks})
    return list(found.values())
