"""Holds an engine that does not say where its weights lie against the checkpoint: finds them by content, once.

The search runs on the first audit that finds most of the checkpoint: before (a start on random weights) there is
nothing to find, and after it the places are known, so that a wrong value in one of them is a wrong part.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from torch import Tensor

from collectors.locate import Located, locate, to_part
from collectors.parts import Record, Slices, audit_parts
from collectors.walk import Found
from workloads.engines.protocol import Rule
from workloads.loading.checkpoint import CheckpointReader
from workloads.loading.shards import TensorMeta
from workloads.loading.tensor_table import DTYPE_BYTES
from workloads.loading.weights import Region

PACKED = "packed"  # origin of tensors that were read back through a kernel, which loses the sign of a zero


class LocatedPieces:
    """The `Pieces` of one rank. tp: ranks that weights are split over. not_loaded: rules of checkpoint tensors that
    the engine leaves out by design, by name pattern, with the reason. whole: roots that owe their whole checkpoint,
    the target first; what others hold, such as a draft in its target's checkpoint, the target owes no more."""

    def __init__(self, tp: int, not_loaded: Sequence[Rule], whole: Sequence[str] = ("target",)) -> None:
        self._tp, self._not_loaded, self._whole = tp, not_loaded, whole
        self._places: dict[tuple[str, bool], list[Located]] = {}
        self._reasons: dict[str, dict[str, str]] = {}
        self._known: dict[CheckpointReader, _Known] = {}

    def records(
        self, root: str, found: Sequence[Found], audited: set[str], reader: CheckpointReader
    ) -> Iterator[tuple[str, Record]]:
        """`part` records, and one `source` record whose regions the audited tensors hold byte for byte."""
        known = self._known.setdefault(reader, _Known(reader))
        excused = {name: reason for name in known.tensors if (reason := self._excuse(name))}
        live = {one.path: one for one in found if one.root == root and one.path in audited}
        self._search(root, live.values(), known, len(known.tensors) - len(excused))
        regions: dict[str, set[Region]] = {}
        for packed, side in known.sides():
            places = [place for place in self._places[root, packed] if place.tensor in live]
            parts = (to_part(place, live[place.tensor].tensor) for place in places)
            for kind, record in audit_parts(root, parts, audited, side, known.slices[packed]):
                if kind != "part":
                    continue
                yield kind, record
                if record["fp"] == record["expected"]:
                    regions.setdefault(record["source"], set()).add(record["region"])
        owes = root in self._whole
        shown = {n: meta for n, meta in known.tensors.items() if owes or n in regions}
        source = _source(root, shown, excused, regions, self._reasons[root] if owes else {})
        yield "source", source if owes else {**source, "of": next(iter(self._whole))}

    def _search(self, root: str, live: Collection[Found], known: "_Known", owed: int) -> None:
        """Where the pieces lie, unless most of them are known to lie somewhere."""
        placed = {place.source for packed in (False, True) for place in self._places.get((root, packed), ())}
        if placed and 2 * len(placed) >= owed:
            return
        reasons = []
        for packed, side in known.sides():
            tensors = [(one.path, one.tensor) for one in live if (one.origin == PACKED) == packed]
            result = locate(tensors, side, self._tp)
            self._places[root, packed] = result.pieces
            reasons.append(result.reasons)
        self._reasons[root] = {name: reasons[0][name] for name in reasons[0].keys() & reasons[1].keys()}

    def _excuse(self, name: str) -> str | None:
        return next((rule.reason for rule in self._not_loaded if fnmatchcase(name, rule.pattern)), None)


class _Known:
    """What is kept of one checkpoint: digests of slices that were read, as they are and with every zero positive."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.plain = reader
        self.unsigned = _UnsignedZeros(reader)
        self.slices: dict[bool, Slices] = {False: {}, True: {}}
        self.tensors = {name: reader.meta(name) for name in reader.names()}

    def sides(self) -> "tuple[tuple[bool, CheckpointReader | _UnsignedZeros], ...]":
        """(whether it is for packed tensors, the checkpoint to hold them against)."""
        return (False, self.plain), (True, self.unsigned)


class _UnsignedZeros:
    """A checkpoint as a kernel that adds zeros to its weights gives it back."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def names(self) -> Iterator[str]:
        return self._reader.names()

    def get(self, name: str) -> Tensor:
        return _unsigned(self._reader.get(name))

    def slice(self, name: str, region: Region) -> Tensor:
        return _unsigned(self._reader.slice(name, region))


def _unsigned(tensor: Tensor) -> Tensor:
    return tensor + 0.0 if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


def _source(
    root: str,
    tensors: Mapping[str, TensorMeta],
    excused: Mapping[str, str],
    regions: Mapping[str, set[Region]],
    reasons: Mapping[str, str],
) -> Record:
    """What a rank holds of the checkpoint. Which slices it owes nobody knows here: all ranks together owe the whole."""
    owed = {name: meta for name, meta in tensors.items() if name not in excused}
    return {
        "root": root,
        "shared": True,
        "tensors": {name: [meta.shape, DTYPE_BYTES[meta.dtype]] for name, meta in tensors.items()},
        "regions": {name: sorted(boxes) for name, boxes in regions.items()},
        "excused": excused,
        "reasons": {name: reason for name, reason in reasons.items() if name in owed},
        "bytes_expected": sum(meta.nbytes for meta in owed.values()),
        "bytes_audited": sum(
            _volume(box) * DTYPE_BYTES[tensors[n].dtype] for n in regions for box in regions[n]
        ),
        "missing": sorted(owed.keys() - regions.keys()),
    }


def _volume(box: Region) -> int:
    return prod(length for _, length in box)
