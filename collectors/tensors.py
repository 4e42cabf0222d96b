"""Audits the tensors of one rank: walks, classifies, fingerprints, and writes `tensors-R.jsonl`."""

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from collectors.classify import RUNTIME, classifier
from collectors.fingerprint import Digest, fingerprints, why_unreadable
from collectors.records import RecordWriter, rank_file
from collectors.trace import StorageTrace
from collectors.walk import Found, storage_address, walk
from workloads.engines.protocol import Engine, Part

Record = dict[str, Any]
Region = tuple[tuple[int, int], ...]

_PARTS_AT_ONCE = 256 << 20  # bytes of parts and of their checkpoint slices held while they are hashed


class CheckpointReader(Protocol):
    """The part of a checkpoint reader that the audit needs."""

    def slice(self, name: str, region: Region) -> Tensor: ...


class TensorAuditor:
    """Audits one engine in one process, observation by observation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # As a captured graph would, the auditor holds the storage that each path had when it was first seen. So no
        # later storage can be given such an address, and an equal address means that nothing moved. The storage is
        # held and not the tensor, whose `.data` may be pointed at another storage.
        self._held: dict[str, torch.UntypedStorage] = {}
        self._trace: StorageTrace | None = None
        # Slices of a checkpoint are read and hashed once, however often the engine is held against it.
        self._slices: WeakKeyDictionary[CheckpointReader, _Slices] = WeakKeyDictionary()

    def trace(self) -> StorageTrace:
        """Context manager for one forward; later observations report what it read and no walk reaches."""
        self._trace = StorageTrace()
        return self._trace

    def observe(self, folder: Path, rank: int, name: str, checkpoint_reader: CheckpointReader) -> None:
        """Writes `<folder>/tensors-<rank>.jsonl` for observation `name`.

        checkpoint_reader: the checkpoint that the engine should hold; pass the same object again and its slices
        are not read again. Raises OSError with the path when the
        records cannot be written, and WalkError when a bound of the walk is met.
        """
        with _collector_paused():
            self._observe(rank_file(folder, "tensors", rank), rank, name, checkpoint_reader)

    def _observe(self, path: Path, rank: int, name: str, checkpoint_reader: CheckpointReader) -> None:
        roots = self._engine.roots()
        runtime = self._engine.runtime_tensors()
        found = walk(roots)
        found += _only_runtime(runtime, {one.storage for one in found})
        for one in found:
            if one.storage:
                self._held.setdefault(one.path, one.tensor.untyped_storage())
        classify = classifier(self._engine.rules(), {storage_address(t) for t in runtime.values()})
        tensors = _tensor_records(found, [classify(one) for one in found])
        audited = {path for record in tensors if _has_digest(record) for path in _names(record)}
        with RecordWriter(path) as writer:
            header = {"rank": rank, "observation": name, "pid": os.getpid(), "root_count": len(roots)}
            writer.write("header", header)
            writer.write_all("tensor", tensors)
            for root in roots:
                slices = self._slices.setdefault(checkpoint_reader, {})
                totals = _Totals(root, audited, slices)
                for batch in _batches(self._engine.parts(root), checkpoint_reader, slices):
                    writer.write_all("part", _part_records(batch, slices))
                    totals.add(batch)
                writer.write("source", totals.record())
            if self._trace is not None:
                seen = self._trace.unreachable({one.storage for one in found})
                writer.write_all("unreachable", (storage.record() for storage in seen))


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


def _tensor_records(found: Sequence[Found], classes: Sequence[tuple[str, str]]) -> list[Record]:
    unreadable = [why_unreadable(one.tensor) for one in found]
    records = [_tensor_record(*row) for row in zip(found, classes, unreadable, strict=True)]
    hashed = [i for i, record in enumerate(records) if record["class"] != RUNTIME and not unreadable[i]]
    digests = fingerprints(found[i].tensor for i in hashed)
    for i, digest in zip(hashed, digests, strict=True):
        records[i] |= {"fp": digest.fp, "slices": digest.slices, "nan": digest.nan, "const": digest.const}
    return records


def _tensor_record(found: Found, class_: tuple[str, str], unreadable: str | None) -> Record:
    """Without digests. A tensor whose bytes cannot be read holds none: nbytes 0, and the reason says why."""
    tensor, (tensor_class, reason) = found.tensor, class_
    strided = tensor.layout is torch.strided
    return {
        "path": found.path,
        "root": found.root,
        "origin": found.origin,
        "class": tensor_class,
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
    }


def _has_digest(record: Record) -> bool:
    return record["fp"] is not None and record["nbytes"] > 0


def _names(record: Record) -> tuple[str, ...]:
    return (record["path"], *record["aliases"])


# Parts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slice:
    """Digest of one slice of the checkpoint, and what it would be after `numeric_cast` (scales only)."""

    fp: str
    cast: str | None
    nbytes: int


_Key = tuple[str, Region]
_Slices = dict[_Key, _Slice]


@dataclass(slots=True)
class _Piece:
    """A part, its value (None if it has no bytes to read), and the checkpoint's where it was read just now."""

    part: Part
    value: Tensor | None
    read: Tensor | None

    @property
    def key(self) -> _Key | None:
        """Which slice of the checkpoint the part must equal, None for padding."""
        return None if self.part.source is None else (self.part.source, self.part.region)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.value, self.read) if tensor is not None)


class _Totals:
    """How much of what a rank had to hold of the checkpoint, for one root, lies in audited tensors."""

    def __init__(self, root: str, audited: set[str], slices: _Slices) -> None:
        self._root = root
        self._slices = slices
        self._audited = audited  # paths of enumerated tensors with bytes and digest
        self._wanted: dict[_Key, int] = {}
        self._covered: set[_Key] = set()

    def add(self, batch: Iterable[_Piece]) -> None:
        for piece in batch:
            key = piece.key
            if key is None:
                continue
            self._wanted[key] = self._slices[key].nbytes
            if piece.part.tensor in self._audited and piece.value is not None and piece.value.nbytes:
                self._covered.add(key)

    def record(self) -> Record:
        return {
            "root": self._root,
            "bytes_expected": sum(self._wanted.values()),
            "bytes_audited": sum(self._wanted[key] for key in self._covered),
            "missing": sorted({name for name, _ in self._wanted.keys() - self._covered}),
        }


def _batches(parts: Iterable[Part], reader: CheckpointReader, known: _Slices) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    nbytes = 0
    for part in parts:
        value = None if why_unreadable(part.value) else part.value
        piece = _Piece(part, value, None)
        if piece.key is not None and piece.key not in known:
            piece.read = reader.slice(*piece.key)
            if value is not None:
                piece.read = piece.read.to(value.device)  # a device hashes far faster than the host
        batch.append(piece)
        nbytes += batch[-1].nbytes
        if nbytes >= _PARTS_AT_ONCE:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _part_records(batch: Sequence[_Piece], slices: _Slices) -> Iterator[Record]:
    """Records of a batch; the digests of what was read for it are left in `slices`."""
    new = [(piece.key, piece.read) for piece in batch if piece.key is not None and piece.read is not None]
    casts = [numeric_cast(read) if _is_scale(key, read) else None for key, read in new]
    digests = _digests_of([*(piece.value for piece in batch), *(read for _, read in new), *casts])
    values, fresh = digests[: len(batch)], digests[len(batch) :]
    for i, (key, read) in enumerate(new):
        digest, cast = fresh[i :: len(new)]
        assert digest is not None, "a slice that was read has a digest"
        slices[key] = _Slice(digest.fp, cast.fp if cast else None, read.nbytes)
    for piece, value in zip(batch, values, strict=True):
        expected = slices[piece.key] if piece.key is not None else None
        yield {
            "tensor": piece.part.tensor,
            "part": piece.part.name,
            "fp": value.fp if value else None,
            "expected": expected.fp if expected else None,
            "cast": expected.cast if expected else None,
            "source": piece.part.source,
            "region": piece.part.region,
            "nbytes": piece.value.nbytes if piece.value is not None else 0,
            "const": value.const if value else None,
            "padding_value": piece.part.padding_value,
        }


def _digests_of(tensors: Sequence[Tensor | None]) -> list[Digest | None]:
    """Whole: an expert's matrix has one digest, be it 2-D in the checkpoint or a slice of a live 3-D tensor."""
    digests = iter(fingerprints((t for t in tensors if t is not None), whole=True))
    return [None if tensor is None else next(digests) for tensor in tensors]


def _is_scale(key: _Key, slice_: Tensor) -> bool:
    """Whether a slice is E8M0 exponents, which a careless copy converts as numbers."""
    return key[0].endswith("weight_scale") and slice_.dtype in (torch.uint8, torch.float8_e8m0fnu)


def numeric_cast(scales: Tensor) -> Tensor:
    """E8M0 bytes converted to uint8 as numbers, the way `copy_` does: 2^-7 becomes 0, 2^3 becomes 8."""
    return scales.view(torch.float8_e8m0fnu).to(torch.uint8)
