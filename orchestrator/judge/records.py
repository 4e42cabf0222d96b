"""Reads a gang's records back, all ranks, and says what is broken about them as typed problems."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from collectors.records import rank_file

Record = dict[str, Any]

#: Classes whose bytes are compared. `runtime` and `handle` bytes say nothing about weights.
COMPARED = frozenset({"weight", "derived", "constant", "unclassified"})

_TENSOR_KEYS = frozenset(
    {"path", "root", "class", "dtype", "shape", "stride", "nbytes", "storage", "offset", "fp", "nan"}
)
_PART_KEYS = frozenset({"tensor", "part", "fp", "expected", "source", "nbytes"})
_SOURCE_KEYS = frozenset({"root", "bytes_expected", "bytes_audited"})
_SHARED_KEYS = _SOURCE_KEYS | {"tensors", "regions"}
_GENERATION_KEYS = frozenset({"id", "token_ids", "top_logprobs"})
_RANK_IN_NAME = re.compile(r"-(\d{5,})\.jsonl$")


#: Fewer bytes than these may be equal by chance.
INDISTINCT_BYTES = 16


def is_repeated(record: Record) -> bool:
    """Whether a tensor or a part is one byte throughout, and long enough for that to mean something."""
    return record.get("const") is not None and record["nbytes"] > INDISTINCT_BYTES


@dataclass(frozen=True, slots=True)
class Problem:
    """Why records cannot carry a verdict.

    type: missing_file | cut_short | bad_json | bad_record | rank_count | unhashed | unfinished | other_run
    """

    type: str
    file: str
    rank: int | None
    message: str


@dataclass(slots=True)
class Audit:
    """One rank's tensors of one observation.

    whole: the file was read without a problem. parts: by tensor path, then by part name. repeated: records of
    a path that has one already. vacuous: tensors that should be compared and have no bytes. unclassified,
    unhashed: paths.
    """

    rank: int
    whole: bool = True
    header: Record = field(default_factory=dict)
    tensors: dict[str, Record] = field(default_factory=dict)
    parts: dict[str, dict[str, Record]] = field(default_factory=dict)
    sources: list[Record] = field(default_factory=list)
    unreachable: list[Record] = field(default_factory=list)
    repeated: int = 0
    vacuous: int = 0
    unclassified: list[str] = field(default_factory=list)
    unhashed: list[str] = field(default_factory=list)
    _by_alias: dict[str, Record] | None = None
    _blank: set[str] | None = None

    def find(self, path: str) -> Record | None:
        """The tensor of that path, or the one that lists the path among its aliases."""
        if path in self.tensors:
            return self.tensors[path]
        if self._by_alias is None:
            self._by_alias = {a: t for t in self.tensors.values() for a in t.get("aliases", ())}
        return self._by_alias.get(path)

    def parts_of(self, tensor: Record) -> dict[str, Record]:
        """Parts recorded under the tensor's path or under another name of the same bytes."""
        for path in (tensor["path"], *tensor.get("aliases", ())):
            if path in self.parts:
                return self.parts[path]
        return {}

    def is_blank(self, path: str) -> bool:
        """Whether the module of this tensor, or one around it, looks like memory that nothing was loaded into: no slice
        of the checkpoint is in its place, and some places repeat one byte."""
        if self._blank is None:
            right: set[str] = set()
            repeats: set[str] = set()
            for name, parts in self.parts.items():
                slices = [part for part in parts.values() if part["expected"] is not None]
                if any(part["fp"] == part["expected"] for part in slices):
                    right.update(_around(name))
                if any(is_repeated(part) for part in slices):
                    repeats.update(_around(name))
            self._blank = repeats - right
        return not self._blank.isdisjoint(_around(path))


def _around(path: str) -> Iterator[str]:
    """The modules that a tensor is in, from its own to its model."""
    model, _, inside = path.partition(":")
    while "." in inside:
        inside = inside.rpartition(".")[0]
        yield f"{model}:{inside}"
    yield model


@contextmanager
def collector_paused() -> Iterator[None]:
    """Millions of acyclic dictionaries make Python's cycle collector scan for nothing (3x the parse time)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Reader:
    """Reads record files below `base` and gathers the problems met, each once."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._problems: dict[Problem, None] = {}
        self._broken: set[Path] = set()

    @property
    def problems(self) -> list[Problem]:
        return list(self._problems)

    def report(self, type_: str, path: Path, rank: int | None, message: str) -> None:
        name = str(path.relative_to(self.base)) if path.is_relative_to(self.base) else str(path)
        self._broken.add(path)
        self._problems[Problem(type_, name, rank, f"{name}: {message}")] = None

    def records(self, path: Path, rank: int | None = None, ends: bool = True) -> list[Record]:
        """Every whole record of a file, without `end`. ends: whether a complete file closes with `end`."""
        values = self._values(path, rank, ends)
        found = [value for value in values if _is_record(value)]
        if len(found) < len(values):
            text = f"{len(values) - len(found)} lines are JSON but no records (an object with a `kind`)."
            self.report("bad_record", path, rank, text)
        return found

    def _values(self, path: Path, rank: int | None, ends: bool) -> list[Any]:
        """What every whole line of a file holds, without `end`."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self.report(
                "missing_file", path, rank, "the file is missing; read the log of the rank that owed it."
            )
            return []
        lines = data.split(b"\n")
        partial = lines.pop()
        loads = orjson.loads
        try:
            found = [loads(line) for line in lines]
        except orjson.JSONDecodeError:
            found = self._parse_broken(path, rank, lines)
        ended = bool(found) and _is_record(found[-1]) and found[-1]["kind"] == "end"
        if partial:
            text = f"the last line is partial ({len(partial)} bytes): the writer was killed while writing."
            self.report("cut_short", path, rank, text)
        elif ends and not ended:
            self.report("cut_short", path, rank, "there is no `end` record: the writer did not finish.")
        return found[:-1] if ended else found

    def _parse_broken(self, path: Path, rank: int | None, lines: list[bytes]) -> list[Any]:
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                self.report("bad_json", path, rank, f"line {number} is not JSON: {error}.")
        return found

    def ranks(self, folder: Path, stem: str, ranks: int) -> None:
        """Reports ranks whose file is missing and ranks that the layout does not have."""
        matches = (_RANK_IN_NAME.search(path.name) for path in folder.glob(f"{stem}-*.jsonl"))
        present = {int(match.group(1)) for match in matches if match}
        for rank in sorted(set(range(ranks)) - present):
            text = f"rank {rank} wrote none; the layout has {ranks} ranks and {len(present)} wrote one."
            self.report("rank_count", rank_file(folder, stem, rank), rank, text)
        for rank in sorted(present - set(range(ranks))):
            text = f"rank {rank} is not in the layout of {ranks} ranks: the records are of another run."
            self.report("rank_count", rank_file(folder, stem, rank), rank, text)

    def audit(self, folder: Path, rank: int) -> Audit:
        """The tensors of one rank; `folder` is an observation's."""
        path = rank_file(folder, "tensors", rank)
        audit = Audit(rank)
        values = self._values(path, rank, ends=True)
        bad = 0
        for value in values:  # the only pass over them all: each one costs as much as a third of parsing
            kind = value["kind"] if _is_record(value) else None
            if kind == "tensor" and value.keys() >= _TENSOR_KEYS:
                _add_tensor(audit, value)
            elif kind == "part" and value.keys() >= _PART_KEYS:
                _add_part(audit, value)
            elif kind == "source" and value.keys() >= (_SHARED_KEYS if value.get("shared") else _SOURCE_KEYS):
                audit.sources.append(value)
            elif kind == "unreachable":
                audit.unreachable.append(value)
            elif kind == "header":
                audit.header = value
            else:
                bad += 1
        if bad:
            text = f"{bad} records have an unknown kind, lack keys, or follow `end` (two runs in one file)."
            self.report("bad_record", path, rank, text)
        if values:
            self._check_audit(path, audit)
        audit.whole = path not in self._broken
        return audit

    def _check_audit(self, path: Path, audit: Audit) -> None:
        if audit.repeated:
            text = f"{audit.repeated} tensors are recorded twice under one path."
            self.report("bad_record", path, audit.rank, text)
        header = audit.header
        if header.get("rank") != audit.rank or header.get("observation") != path.parent.name:
            text = f"the header says rank {header.get('rank')}, observation {header.get('observation')!r}."
            self.report("other_run", path, audit.rank, text)
        roots = len({source["root"] for source in audit.sources})
        if roots != header.get("root_count", roots):
            text = f"the header announces {header['root_count']} roots and {roots} have totals."
            self.report("bad_record", path, audit.rank, text)
        if audit.unhashed:
            count, first = len(audit.unhashed), audit.unhashed[0]
            text = f"{count} tensors or parts that must be compared have no fingerprint, e.g. {first}."
            self.report("unhashed", path, audit.rank, text)

    def generations(self, folder: Path, stem: str) -> dict[str, Record]:
        """Generations by request id, in file order; `stem` is `generations` or `gsm8k`."""
        path = folder / f"{stem}.jsonl"
        found: dict[str, Record] = {}
        for record in self.records(path, 0):
            if record["kind"] != "generation":
                continue
            if not record.keys() >= _GENERATION_KEYS or record["id"] in found:
                self.report(
                    "bad_record", path, 0, f"generation {record.get('id')!r} lacks keys or is there twice."
                )
                continue
            found[record["id"]] = record
        return found


def _is_record(value: Any) -> bool:
    return type(value) is dict and "kind" in value


def _add_tensor(audit: Audit, tensor: Record) -> None:
    path, class_ = tensor["path"], tensor["class"]
    audit.repeated += path in audit.tensors
    audit.tensors[path] = tensor
    if class_ not in COMPARED:
        return
    if not tensor["nbytes"]:
        audit.vacuous += 1
    elif tensor["fp"] is None:
        audit.unhashed.append(path)
    if class_ == "unclassified" and tensor["nbytes"]:
        audit.unclassified.append(path)


def _add_part(audit: Audit, part: Record) -> None:
    parts = audit.parts.setdefault(part["tensor"], {})
    name = part["part"]
    if name in parts:  # several padding regions of one tensor share a name
        name = f"{name}#{len(parts)}"
    parts[name] = part
    if part["fp"] is None and part["nbytes"]:
        audit.unhashed.append(f"{part['tensor']} [{name}]")
