"""Audits the tensors of one rank: walks, classifies, fingerprints, and writes `tensors-R.jsonl`."""

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from collectors.classify import RUNTIME, Class, classifier
from collectors.derived import follows
from collectors.fingerprint import fingerprints, why_unreadable
from collectors.parts import Record, Slices, audit_parts
from collectors.records import RecordWriter, rank_file
from collectors.trace import StorageTrace
from collectors.walk import Found, storage_address, walk
from workloads.engines.protocol import Audited
from workloads.loading.checkpoint import CheckpointReader

Packed = Mapping[str, Callable[[], Tensor]]


class Pieces(Protocol):
    """Says which slices of the checkpoint a rank holds, and how much of what it owes: `part` and `source` records."""

    def records(
        self, root: str, found: Sequence[Found], audited: set[str], reader: CheckpointReader
    ) -> Iterator[tuple[str, Record]]: ...


class DeclaredPieces:
    """Of an engine that says itself which slice lies where."""

    def __init__(self, engine: Audited) -> None:
        self._engine = engine
        # Slices of a checkpoint are read and hashed once, however often the engine is held against it.
        self._slices: WeakKeyDictionary[CheckpointReader, Slices] = WeakKeyDictionary()

    def records(
        self, root: str, found: Sequence[Found], audited: set[str], reader: CheckpointReader
    ) -> Iterator[tuple[str, Record]]:
        known = self._slices.setdefault(reader, {})
        return audit_parts(root, self._engine.parts(root), audited, reader, known)


class TensorAuditor:
    """Audits one engine in one process, observation by observation.

    pieces: how the engine's tensors are held against the checkpoint. packed: bytes that a kernel holds and no tensor
    shows, each read back by a call, by path (the root in front). around: what else is walked, of which nothing is owed
    to a checkpoint. header: more fields of the records' header.
    """

    def __init__(
        self,
        engine: Audited,
        pieces: Pieces | None = None,
        packed: Callable[[], Packed] = dict,
        around: Callable[[], Mapping[str, nn.Module]] = dict,
        header: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._pieces = pieces or DeclaredPieces(engine)
        self._packed, self._around = packed, around
        self._header = dict(header or {})
        # As a captured graph would, the auditor holds the storage that each path had when it was first seen. So no
        # later storage can be given such an address, and an equal address means that nothing moved. The storage is
        # held and not the tensor, whose `.data` may be pointed at another storage.
        self._held: dict[str, torch.UntypedStorage] = {}
        self._trace: StorageTrace | None = None

    def trace(self) -> StorageTrace:
        """Context manager for one forward; later observations report what it read and no walk reaches."""
        self._trace = StorageTrace()
        return self._trace

    def observe(
        self,
        folder: Path,
        rank: int,
        name: str,
        checkpoint_reader: CheckpointReader,
        own_readers: Mapping[str, CheckpointReader] = MappingProxyType({}),
    ) -> None:
        """Writes `<folder>/tensors-<rank>.jsonl` for observation `name`.

        checkpoint_reader: the checkpoint that the engine should hold; pass the same object again and its slices
        are not read again. own_readers: of roots with a checkpoint of their own. Raises OSError with the path when
        the records cannot be written, and WalkError when a bound of the walk is met.
        """
        with _collector_paused():
            readers = defaultdict(lambda: checkpoint_reader, own_readers)
            self._observe(rank_file(folder, "tensors", rank), rank, name, readers)

    def _observe(self, path: Path, rank: int, name: str, readers: Mapping[str, CheckpointReader]) -> None:
        roots = self._engine.roots()
        runtime = self._engine.runtime_tensors()
        found = walk({**roots, **self._around()})
        found += _only_runtime(runtime, {one.storage for one in found})
        for one in found:
            if one.storage:
                self._held.setdefault(one.path, one.tensor.untyped_storage())
        found += _read_back(self._packed())
        classify = classifier(self._engine.rules(), {storage_address(t) for t in runtime.values()})
        tensors = _tensor_records(found, [classify(one) for one in found])
        derived = follows(roots)
        for record in tensors:
            record |= next((derived[path] for path in _names(record) if path in derived), {})
        audited = {path for record in tensors if _has_digest(record) for path in _names(record)}
        with RecordWriter(path) as writer:
            header = {"rank": rank, "observation": name, "pid": os.getpid(), "root_count": len(roots)}
            writer.write("header", header | self._header)
            writer.write_all("tensor", tensors)
            for root in roots:
                for kind, record in self._pieces.records(root, found, audited, readers[root]):
                    writer.write(kind, record)
            if self._trace is not None:
                reached = {one.storage for one in found} | self._only_ours()
                seen = self._trace.unreachable(reached)
                writer.write_all("unreachable", (storage.record() for storage in seen))

    def _only_ours(self) -> set[int]:
        """Storages that live because the auditor holds them: nobody else does, so no forward can use them."""
        held = {id(storage): storage for storage in self._held.values()}.values()
        times = Counter(storage.data_ptr() for storage in held)
        return {s.data_ptr() for s in held if _users(s) == times[s.data_ptr()]}


def _users(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects share the memory; torch tells its graph trees the same way."""
    return int(torch._C._storage_Use_Count(storage._cdata))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """An audit makes many objects and no cycles: Python's cycle collector would double its time for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _only_runtime(runtime: Mapping[str, Tensor], reached: set[int]) -> Iterator[Found]:
    """Runtime tensors that the engine names and the walk did not reach. Their names have the root in front."""
    for name, tensor in runtime.items():
        address = storage_address(tensor)
        if address not in reached:
            path = name if ":" in name else f"{RUNTIME}:{name}"
            yield Found(path, path.partition(":")[0], "seen", tensor, address)


def _read_back(packed: Packed) -> Iterator[Found]:
    """What kernels hold, as tensors without a storage of their own."""
    for path, read in packed.items():
        yield Found(path, path.partition(":")[0], "packed", read(), 0)


def _tensor_records(found: Sequence[Found], classes: Sequence[Class]) -> list[Record]:
    unreadable = [why_unreadable(one.tensor) for one in found]
    records = [_tensor_record(*row) for row in zip(found, classes, unreadable, strict=True)]
    hashed = [i for i, record in enumerate(records) if record["class"] != RUNTIME and not unreadable[i]]
    digests = fingerprints(found[i].tensor for i in hashed)
    for i, digest in zip(hashed, digests, strict=True):
        records[i] |= {"fp": digest.fp, "slices": digest.slices, "nan": digest.nan, "const": digest.const}
    return records


def _tensor_record(found: Found, class_: Class, unreadable: str | None) -> Record:
    """Without digests. A tensor whose bytes cannot be read holds none: nbytes 0, and the reason says why."""
    tensor, reason = found.tensor, class_.reason
    strided = tensor.layout is torch.strided
    return {
        "path": found.path,
        "root": found.root,
        "origin": found.origin,
        "class": class_.name,
        "reason": f"{reason}; no bytes to audit: {unreadable}" if unreadable else reason,
        "dtype": dtype_name(tensor.dtype),
        "shape": tuple(tensor.shape),
        "stride": tensor.stride() if strided else (),
        "nbytes": 0 if unreadable else tensor.nbytes,
        "storage": found.storage,
        "offset": tensor.storage_offset() if strided else 0,
        "fp": None,
        "slices": (),
        "nan": False,
        "const": None,
        "aliases": found.aliases,
        **({"may_move": True} if class_.may_move else {}),
    }


def _has_digest(record: Record) -> bool:
    return record["fp"] is not None and record["nbytes"] > 0


def _names(record: Record) -> tuple[str, ...]:
    return (record["path"], *record["aliases"])
