"""Turns one wrong tensor into the causes that its fingerprints show, most specific first."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from orchestrator.judge.compare import Difference, differing_slices
from orchestrator.judge.parts import is_padding, is_wrong, wanted
from orchestrator.judge.records import INDISTINCT_BYTES, Audit, Record, is_repeated

#: Bytes of a poisoned, never written storage.
POISON = 0xFF
#: Origin of bytes that a kernel holds and no tensor shows.
PACKED = "packed"
#: Contents that so many places share say nothing about where they came from (norms of ones, say).
_COMMON = 4
_REARRANGED = "the bytes of its whole tensor, padding included, are the right ones in another order"
_EXPERT = re.compile(r"(?<=experts\.)\d+")
_GATE_OR_UP = re.compile(r"\b(w1|w3|gate_proj|up_proj)\b")


@dataclass(frozen=True, slots=True)
class Place:
    """Where some bytes belong."""

    rank: int
    tensor: str
    part: str  # "" for a tensor that has no parts


@dataclass(frozen=True, slots=True)
class Cause:
    """One tensor, or one part of it, on one rank, and why it is wrong. Fingerprints are None where unknown."""

    code: str
    rank: int
    path: str
    part: str = ""
    note: str = ""
    now: str | None = None
    before: str | None = None
    expected: str | None = None


@dataclass(frozen=True)
class View:
    """What one rank's observation is judged by. expected: the other side of the check; before: the same
    process ahead of the load; truth: a fresh start on what was loaded; places: where given bytes belong, on
    any rank; identical_runs: whether the two sides loaded the same checkpoint in the same way, so that
    nothing but chance can make them differ; is_other_version: whether `expected` is of the base arm, which
    neither its checkpoint slices nor a fresh start of the candidate say anything about."""

    observed: Audit
    expected: Audit
    before: Audit | None
    truth: Audit | None
    places: Callable[[Record, int], list[Place]]
    identical_runs: bool = False
    is_other_version: bool = False


def explain(view: View, difference: Difference) -> list[Cause]:
    """At least one cause of a difference that `compare` found."""
    records = (difference.observed, difference.expected)
    if any(record is not None and record.get("origin") == PACKED for record in records):
        return [_told_packed(cause) for cause in _explain(view, difference)]
    return _explain(view, difference)


def _told_packed(cause: Cause) -> Cause:
    """Nobody finds such a tensor by its path in the model."""
    notes = (cause.note, "its bytes lie in a form of the kernel's own and were read back through the kernel")
    return replace(cause, note="; ".join(filter(None, notes)))


def _explain(view: View, difference: Difference) -> list[Cause]:
    path, status, got, want = difference
    rank = view.observed.rank
    if status == "missing" or got is None:
        return [Cause("missing", rank, path, expected=want["fp"] if want else None)]
    if status != "differs" or want is None:
        return [_structural(rank, difference, got, want)]
    parts = view.observed.parts_of(got)
    wrong = [name for name, part in parts.items() if is_wrong(part)]
    if wrong:
        return explain_parts(view, path, wrong)
    if view.is_other_version:
        note = "the base version holds other bytes after the same steps"
        return [Cause("differs", rank, path, note=note, now=got["fp"], expected=want["fp"])]
    if _other_side_is_wrong(view, got, want):
        note = "it is the other side of the comparison that departs from a fresh start or the checkpoint"
        return [Cause("differs", rank, path, note=note, now=got["fp"], expected=want["fp"])]
    if parts and sum(part["nbytes"] for part in parts.values()) >= got["nbytes"]:
        note = "every part of it is right, the whole is not"
        return [Cause("wrong_layout", rank, path, note=note, now=got["fp"], expected=want["fp"])]
    return [_whole(view, path, got, want)]


def explain_parts(view: View, path: str, names: Iterable[str]) -> list[Cause]:
    """Causes of the wrong parts of one tensor."""
    tensor = view.observed.find(path)
    parts = view.observed.parts_of(tensor) if tensor else view.observed.parts.get(path, {})
    old = view.before.find(path) if view.before else None
    before = view.before.parts_of(old) if view.before and old else {}
    values = {part.get("padding_value") for part in parts.values() if is_padding(part)}
    return [_part(view, path, parts[name], name, before.get(name), values) for name in names]


def underived(rank: int, got: Record, before: Audit | None) -> Cause:
    """Why a derived tensor does not follow from the weights beside it."""
    old = before.find(got["path"]) if before else None
    far = got.get("deviation")
    note = "" if far is None else f"largest absolute difference from what its weights give {far:.3g}"
    code = "wrong_derived"
    if got.get("const") == POISON:
        code, note = "uninitialised", "all bytes are 0xFF, the poison of memory that nothing wrote"
    elif old is not None and old["fp"] == got["fp"] and old.get("follows") != got["follows"]:
        code = "stale"
    return Cause(code, rank, got["path"], "", note, got["fp"], old["fp"] if old else None, got["follows"])


def _other_side_is_wrong(view: View, got: Record, want: Record) -> bool:
    """Whether `got` is what it should be, so that the fault must lie in what it is compared with."""
    if any(is_wrong(part) for part in view.expected.parts_of(want).values()):
        return True
    true = view.truth.find(got["path"]) if view.truth and view.truth is not view.expected else None
    return true is not None and true["fp"] == got["fp"]


def _structural(rank: int, difference: Difference, got: Record, want: Record | None) -> Cause:
    """A difference in form: what it was and what it should be."""
    status = difference.status
    note = ""
    if want is not None and status in ("dtype", "layout", "vacuous"):
        keys = ("dtype",) if status == "dtype" else ("shape", "stride")
        note = "; ".join(f"{key} {got[key]}, expected {want[key]}" for key in keys if got[key] != want[key])
    if want is not None and status == "alias_broken":
        lost = {want["path"], *want.get("aliases", ())} - {got["path"], *got.get("aliases", ())}
        note = f"no longer the same bytes as {', '.join(sorted(lost))}"
    if status == "unclassified":
        note = "it differs, and no rule says whether it is a weight or runtime state"
    return Cause(
        status, rank, difference.path, note=note, now=got["fp"], expected=want["fp"] if want else None
    )


def _part(
    view: View, path: str, part: Record, name: str, before: Record | None, padding: Collection[float | None]
) -> Cause:
    """padding: values of the padding of the same tensor."""
    code, note = _part_code(view, path, part, before, padding)
    return Cause(
        code, view.observed.rank, path, name, note, part["fp"], before["fp"] if before else None, wanted(part)
    )


def _part_code(
    view: View, path: str, part: Record, before: Record | None, padding: Collection[float | None]
) -> tuple[str, str]:
    unchanged = before is not None and part["fp"] == before["fp"]
    if before is not None and unchanged and not is_padding(part) and not is_wrong(before):
        return "stale", ""
    if view.observed.is_blank(path):
        return "uninitialised", "nothing around it is right, and some of that is one repeated byte"
    if is_padding(part):
        return ("wrong_layout", _REARRANGED) if part.get("rearranged") else _padding_code(part)
    if part.get("cast") is not None and part["fp"] == part["cast"]:
        return "numeric_cast", ""
    if part.get("const") == POISON:
        return "uninitialised", "all bytes are 0xFF, the poison of memory that nothing wrote"
    if part.get("const") is not None and part["const"] in padding:
        return (
            "uninitialised",
            f"all bytes are {part['const']}, as they were created: nothing was loaded here",
        )
    if unchanged and is_repeated(part):
        note = f"all bytes are {part['const']}, before the update too: nothing was ever loaded here"
        return "uninitialised", note
    if unchanged:
        return "stale", ""
    if part.get("patch") is not None and part["patch"] in padding:
        return "overwritten_by_padding", f"all its wrong bytes are {part['patch']}, the value of the padding"
    places = view.places(part, view.observed.rank)
    if any((place.rank, place.tensor, place.part) == (view.observed.rank, path, "") for place in places):
        return "wrong_layout", "in the checkpoint's order it reads as the right tensor does in the kernel's"
    if places:
        return "found_elsewhere", describe_place(places[0], part, view.observed.rank)
    if part.get("shifted"):
        return "found_elsewhere", f"its rows are those that belong {part['shifted']} rows further"
    if part.get("rearranged"):
        return "wrong_layout", _REARRANGED
    if part.get("decayed"):
        return "processed_twice", "it is -exp of what the checkpoint holds"
    if part.get("permuted"):
        return "wrong_layout", "its bytes are those of the checkpoint, in another order"
    tensor = view.observed.find(path)
    if tensor is not None and tensor["nan"]:
        return "uninitialised", "it holds NaN"
    if is_repeated(part):
        return "uninitialised", f"all bytes are {part['const']}, and the checkpoint's are not"
    return "checkpoint_mismatch", ""


def _padding_code(part: Record) -> tuple[str, str]:
    const, value = part.get("const"), part.get("padding_value")
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if const == POISON:
        return "stale_padding", f"0xFF, the poison of fresh memory, where {number} belongs"
    if const is not None:
        return "wrong_padding_value", f"{const} where {number} belongs"
    return "stale_padding", f"left-over bytes where {number} belongs"


def _whole(view: View, path: str, got: Record, want: Record) -> Cause:
    """A tensor without parts, or whose difference lies outside of its parts."""
    old = view.before.find(path) if view.before else None
    code, note = _whole_code(view, path, got, want, old)
    return Cause(code, view.observed.rank, path, "", note, got["fp"], old["fp"] if old else None, want["fp"])


def _whole_code(view: View, path: str, got: Record, want: Record, old: Record | None) -> tuple[str, str]:
    if old is not None and got["fp"] == old["fp"]:
        return "stale", ""
    if got.get("const") == POISON:
        return "uninitialised", "all bytes are 0xFF, the poison of memory that nothing wrote"
    if got["nan"] and not want["nan"]:
        return "uninitialised", "it holds NaN, and the expected tensor does not"
    permuted = _permuted_slices(got, want)
    if permuted:
        return permuted
    places = view.places(got, view.observed.rank)
    if places:
        return "found_elsewhere", describe_place(places[0], got, view.observed.rank)
    if view.identical_runs:
        return "uninitialised", "two identical loads left different bytes"
    slices = differing_slices(got, want)
    code = "wrong_derived" if got["class"] == "derived" and _is_sound(view.observed, path) else "differs"
    return code, f"in slices {_some(slices)} of {got['shape'][0]}" if slices else ""


def _is_sound(audit: Audit, path: str) -> bool:
    """Whether the weights of the module that a tensor belongs to are right."""
    module = f"{path.rpartition('.')[0]}."
    parts = {p: parts for p, parts in audit.parts.items() if p.startswith(module)}
    wrong = any(is_wrong(part) for held in parts.values() for part in held.values())
    return bool(parts) and not wrong


def _permuted_slices(got: Record, want: Record) -> tuple[str, str] | None:
    """The same slices in another order: experts, heads or layers sit in each other's place."""
    mine, theirs = got.get("slices") or [], want.get("slices") or []
    slices = differing_slices(got, want)
    if not slices or sorted(mine) != sorted(theirs):
        return None
    first = slices[0]
    return "found_elsewhere", f"slice {first} holds what belongs in slice {theirs.index(mine[first])}"


def _some(numbers: list[int], limit: int = 6) -> str:
    shown = ", ".join(map(str, numbers[:limit]))
    return f"{shown}, … ({len(numbers)})" if len(numbers) > limit else shown


def describe_place(place: Place, record: Record, rank: int) -> str:
    """`holds …w3 of the same expert, on rank 4`: what a person looks for."""
    what = place.part or place.tensor
    where = "" if place.rank == rank else f", which belongs on rank {place.rank}"
    if what == (record.get("part") or record.get("path")):
        return f"it holds the shard of rank {place.rank}"
    own = record.get("part") or ""
    if own != what and _GATE_OR_UP.sub("", own) == _GATE_OR_UP.sub("", what):
        return f"it holds {what}{where}: gate and up are swapped"
    if own != what and _EXPERT.sub("", own) == _EXPERT.sub("", what):
        return f"it holds {what}{where}: another expert's weights"
    return f"it holds {what}{where}"


def distinct_places(places: list[Place]) -> list[Place]:
    """Empty when the bytes are so common that they prove nothing."""
    return places if len({(p.tensor, p.part) for p in places}) <= _COMMON else []


def is_distinct(record: Record) -> bool:
    """Whether equal fingerprints of such content are evidence of a common origin."""
    return record.get("const") is None and record["nbytes"] >= INDISTINCT_BYTES
