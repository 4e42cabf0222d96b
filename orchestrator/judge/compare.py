"""Compares one rank's audits: status per tensor, where a tensor differs, what moved, what did not change."""

from collections import Counter
from typing import NamedTuple

from orchestrator.judge.records import COMPARED, Audit, Record

#: Classes whose address a captured graph or a kernel object may hold.
ADDRESSED = frozenset({"weight", "derived", "constant"})


class Difference(NamedTuple):
    """One tensor of which two audits disagree. `observed` is None when missing, `expected` when extra."""

    path: str
    status: str  # differs | dtype | layout | missing | extra | vacuous | unclassified | alias_broken
    observed: Record | None
    expected: Record | None


def compare(observed: Audit, expected: Audit) -> tuple[Counter[str], list[Difference]]:
    """Tensors by status (`equal` and `vacuous`-on-both-sides are counted only), and the differences.

    Runtime tensors are skipped. Handles must be present on both sides; their values are addresses.
    """
    counts: Counter[str] = Counter()
    found: list[Difference] = []
    have = observed.tensors
    equal = 0
    for path, want in expected.tensors.items():
        if want["class"] not in COMPARED:
            if want["class"] == "handle" and path not in have:
                found.append(Difference(path, "missing", None, want))
            continue
        got = have.get(path) or observed.find(path)
        if (  # the fast path: the same bytes in the same form, and bytes there are
            got is not None
            and got["fp"] == want["fp"]
            and got["shape"] == want["shape"]
            and got["stride"] == want["stride"]
            and got["dtype"] == want["dtype"]
            and got.get("aliases") == want.get("aliases")
            and want["nbytes"]
        ):
            equal += 1
            continue
        status = _status(got, want)
        counts[status] += 1
        if status not in ("equal", "empty"):
            found.append(Difference(path, status, got, want))
    found += _extra(observed, expected)
    counts.update(d.status for d in found if d.status == "extra" or _is_handle(d))
    counts["equal"] += equal
    return counts, found


def _status(got: Record | None, want: Record) -> str:
    if got is None:
        return "missing"
    if not got["nbytes"] and not want["nbytes"]:
        return "empty"
    if not got["nbytes"] or not want["nbytes"]:
        return "vacuous"
    if got["dtype"] != want["dtype"]:
        return "dtype"
    if got["shape"] != want["shape"] or got["stride"] != want["stride"]:
        return "layout"
    if got["fp"] != want["fp"]:
        return "unclassified" if "unclassified" in (got["class"], want["class"]) else "differs"
    return "alias_broken" if _broken(got, want) else "equal"


def _broken(got: Record, want: Record) -> bool:
    """Whether a name that should be the same bytes no longer is."""
    names = {want["path"], *want.get("aliases", ())}
    return not names <= {got["path"], *got.get("aliases", ())}


def _extra(observed: Audit, expected: Audit) -> list[Difference]:
    surplus = observed.tensors.keys() - expected.tensors.keys()
    if not surplus:
        return []
    known = {alias for t in expected.tensors.values() for alias in t.get("aliases", ())}
    return [
        Difference(path, "extra", got, None)
        for path, got in observed.tensors.items()
        if path in surplus and path not in known and (got["class"] in COMPARED or got["class"] == "handle")
    ]


def _is_handle(difference: Difference) -> bool:
    return difference.expected is not None and difference.expected["class"] == "handle"


def differing_slices(got: Record, want: Record) -> list[int]:
    """Indices along the first dimension (experts, heads) whose bytes differ; empty when not recorded."""
    left, right = got.get("slices") or [], want.get("slices") or []
    if len(left) != len(right):
        return []
    return [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]


def moved(first: Audit, later: Audit) -> tuple[int, list[Difference]]:
    """Tensors looked at, and those whose storage or offset changed, or which are gone, in one process."""
    looked_at = 0
    found = []
    for path, before in first.tensors.items():
        if before["class"] not in ADDRESSED or not before["nbytes"] or before.get("may_move"):
            continue
        if not before["storage"]:
            continue  # what a kernel packed away was read back and has no address of its own
        looked_at += 1
        after = later.tensors.get(path) or later.find(path)
        if after is None:
            found.append(Difference(path, "missing", None, before))
        elif after["storage"] != before["storage"] or after["offset"] != before["offset"]:
            found.append(Difference(path, "moved", after, before))
    return looked_at, found


def unchanged(before: Audit, after: Audit) -> tuple[Counter[str], list[tuple[str, str, Record]]]:
    """Weights and checkpoint slices that an update left as they were: (path, part name or "", record).

    A slice that is the same in both checkpoints is not expected to change and is counted as `same_in_both`.
    """
    counts: Counter[str] = Counter()
    found: list[tuple[str, str, Record]] = []
    for path, got in after.tensors.items():
        old = before.tensors.get(path)
        parts, old_parts = after.parts_of(got), before.parts_of(old) if old else {}
        if old is None or (old_parts and any(p["source"] is not None for p in parts.values())):
            _unchanged_parts(path, old_parts, parts, counts, found)
        elif got["nbytes"] and (got["class"] == "weight" or parts):  # no slices yet: it held random weights
            same = got["fp"] == old["fp"]
            counts["unchanged" if same else "changed"] += 1
            if same:
                found.append((path, "", got))
    return counts, found


def _unchanged_parts(
    path: str,
    before: dict[str, Record],
    after: dict[str, Record],
    counts: Counter[str],
    found: list[tuple[str, str, Record]],
) -> None:
    for name, part in after.items():
        old = before.get(name)
        if part["source"] is None or old is None:
            continue
        if part["expected"] is not None and part["expected"] == old["expected"]:
            counts["same_in_both"] += 1
        elif part["fp"] != old["fp"]:
            counts["changed"] += 1
        else:
            counts["unchanged"] += 1
            found.append((path, name, part))
