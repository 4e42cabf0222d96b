"""Finds where given bytes belong: on this rank first, then on any other."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.judge.diagnose import Place, distinct_places, is_distinct
from orchestrator.judge.records import Audit, Reader, Record

Index = dict[str, list[Place]]
_KEPT = 5  # per fingerprint; more of the same prove nothing


class Places:
    """Expected fingerprints of all ranks: of checkpoint slices, and of a fresh start's whole tensors.

    folders: the observation and its reference, if there is one. Read only when a tensor's bytes are neither
    right nor explained by this rank's own records.
    """

    def __init__(self, reader: Reader, folders: Sequence[Path], ranks: int) -> None:
        self._reader, self._folders, self._ranks = reader, folders, ranks
        self._index: Index | None = None

    def of(self, record: Record, rank: int) -> list[Place]:
        """Places of the bytes of a tensor or part, those on `rank` first; empty when they prove nothing."""
        if not is_distinct(record):
            return []
        if self._index is None:
            self._index = self._read()
        places = distinct_places(self._index.get(record["fp"], []))
        return sorted(places, key=lambda place: place.rank != rank)

    def _read(self) -> Index:
        index: Index = {}
        for rank in range(self._ranks):
            for folder in self._folders:
                for fp, place in _expected(self._reader.audit(folder, rank), folder.name == "fresh"):
                    known = index.setdefault(fp, [])
                    if len(known) < _KEPT * self._ranks and place not in known:
                        known.append(place)
        return index


def _expected(audit: Audit, is_reference: bool) -> Iterator[tuple[str, Place]]:
    for path, parts in audit.parts.items():
        for name, part in parts.items():
            if part["source"] is not None and part["expected"] is not None:
                yield part["expected"], Place(audit.rank, path, name)
    if is_reference:
        for path, tensor in audit.tensors.items():
            if tensor["fp"] is not None and is_distinct(tensor):
                yield tensor["fp"], Place(audit.rank, path, "")
