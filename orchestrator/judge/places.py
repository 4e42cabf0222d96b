"""Finds where given bytes belong: on this rank first, then on any other."""

import re
from collections.abc import Iterator
from pathlib import Path

import orjson

from collectors.records import rank_file
from orchestrator.judge.diagnose import Place, distinct_places, is_distinct
from orchestrator.judge.records import Record

#: What a checkpoint slice should be, and what a whole tensor of a fresh start is.
_EXPECTED = re.compile(rb'"expected": ?"([0-9a-f]{32})"')
_WHOLE = re.compile(rb'"fp": ?"([0-9a-f]{32})"')


class Places:
    """Expected fingerprints of all ranks: of checkpoint slices, and of a fresh start's whole tensors.

    observation: folder of the observation. reference: folder of a fresh start on what it loaded, if there is
    one. Files are searched for fingerprints only when a tensor is neither right nor explained by this rank's
    own records, and only the lines found are parsed.
    """

    def __init__(self, observation: Path, reference: Path | None, ranks: int) -> None:
        self._sources = [(observation, _EXPECTED)] + ([(reference, _WHOLE)] if reference else [])
        self._ranks = ranks
        self._index: dict[bytes, list[tuple[Path, int, int]]] | None = None  # path, rank, offset of the line

    def of(self, record: Record, rank: int) -> list[Place]:
        """Places of the bytes of a tensor or part, those on `rank` first; empty when they prove nothing."""
        if not is_distinct(record):
            return []
        if self._index is None:
            self._index = self._search()
        hits = self._index.get(record["fp"].encode(), ())
        places = distinct_places([place for hit in hits for place in _place(record["fp"], *hit)])
        return sorted(places, key=lambda place: place.rank != rank)

    def _search(self) -> dict[bytes, list[tuple[Path, int, int]]]:
        index: dict[bytes, list[tuple[Path, int, int]]] = {}
        for folder, pattern in self._sources:
            for rank in range(self._ranks):
                path = rank_file(folder, "tensors", rank)
                if path.is_file():  # a missing one is a problem of its own
                    data = path.read_bytes()
                    for match in pattern.finditer(data):
                        line = data.rfind(b"\n", 0, match.start()) + 1
                        index.setdefault(match[1], []).append((path, rank, line))
        return index


def _place(fp: str, path: Path, rank: int, offset: int) -> Iterator[Place]:
    """The place for which the line at `offset` expects `fp`; none when it merely holds it, perhaps wrongly."""
    with path.open("rb") as file:
        file.seek(offset)
        record = orjson.loads(file.readline())
    if record["kind"] == "part" and record["expected"] == fp:
        yield Place(rank, record["tensor"], record["part"])
    elif record["kind"] == "tensor" and is_distinct(record):
        yield Place(rank, record["path"], "")
