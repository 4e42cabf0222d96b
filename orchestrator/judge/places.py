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
        self._files: list[_File] | None = None

    def of(self, record: Record, rank: int) -> list[Place]:
        """Places of the bytes of a tensor or part, those on `rank` first; empty when they prove nothing."""
        if not is_distinct(record):
            return []
        if self._files is None:
            self._files = list(self._open())
        fp = record["fp"]
        places = distinct_places([place for file in self._files for place in file.places(fp)])
        return sorted(places, key=lambda place: place.rank != rank)

    def _open(self) -> Iterator["_File"]:
        for folder, pattern in self._sources:
            for rank in range(self._ranks):
                path = rank_file(folder, "tensors", rank)
                if path.is_file():  # a missing one is a problem of its own
                    yield _File(path, rank, pattern)


class _File:
    """One rank's records: which fingerprints occur, and, once one is asked for, in which lines."""

    def __init__(self, path: Path, rank: int, pattern: re.Pattern[bytes]) -> None:
        self._path, self._rank, self._pattern = path, rank, pattern
        self._present = frozenset(pattern.findall(path.read_bytes()))
        self._lines: dict[bytes, list[int]] | None = None

    def places(self, fp: str) -> Iterator[Place]:
        """Places for which a line expects `fp`; not those that merely hold it, perhaps wrongly."""
        key = fp.encode()
        if key not in self._present:
            return
        if self._lines is None:
            self._lines = self._find_lines()
        with self._path.open("rb") as file:
            for offset in self._lines[key]:
                file.seek(offset)
                record = orjson.loads(file.readline())
                if record["kind"] == "part" and record["expected"] == fp:
                    yield Place(self._rank, record["tensor"], record["part"])
                elif record["kind"] == "tensor" and is_distinct(record):
                    yield Place(self._rank, record["path"], "")

    def _find_lines(self) -> dict[bytes, list[int]]:
        """Offsets of the lines in which each fingerprint occurs."""
        data = self._path.read_bytes()
        lines: dict[bytes, list[int]] = {}
        for match in self._pattern.finditer(data):
            lines.setdefault(match[1], []).append(data.rfind(b"\n", 0, match.start()) + 1)
        return lines
