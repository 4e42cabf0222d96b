"""Append-only JSON-lines records: the only thing that crosses from ranks to the judge.

Every line is one record with a `kind`. A file ends with `{"kind": "end", ...}`; a file without it, or with
a broken last line, was cut short by a kill and says so when read. Standard library only.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from workloads import heartbeat


class RecordWriter:
    """Writes records to one file, flushed and fsynced by `sync()` and on close.

    Raises OSError with the path when the disk is full or the folder is not writable.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        line = json.dumps({"kind": kind, **record}, separators=(",", ":"), allow_nan=False)
        with self._naming_the_file():
            self._file.write(line.encode() + b"\n")
        heartbeat.advance()

    def write_all(self, kind: str, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            self.write(kind, record)

    def sync(self) -> None:
        with self._naming_the_file():
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.write("end", {})
        self.close()


def rank_file(folder: Path, stem: str, rank: int) -> Path:
    """`tensors`, 3 -> `<folder>/tensors-00003.jsonl`."""
    return folder / f"{stem}-{rank:05d}.jsonl"
