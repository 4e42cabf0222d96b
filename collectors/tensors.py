"""Audits the tensors of one rank: walks, classifies, fingerprints, and writes `tensors-R.jsonl`."""

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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

    def trace(self) -> StorageTrace:
        """Context manager for one forward; later observations report what it read and no walk reaches."""
        self._trace = StorageTrace()
        return self._trace

    def observe(self, folder: Path, rank: int, name: str, checkpoint_reader: CheckpointReader) -> None:
        """Writes `<folder>/tensors-<rank>.jsonl` for observation `name`.

        checkpoint_reader: the checkpoint that the engine should hold. Raises OSError with the path when the
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
                totals = _Totals(root, audited)
                for batch in _batches(self._engine.parts(root), checkpoint_reader):
                    writer.write_all("part", _part_records(batch))
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


@dataclass(slots=True)
class _Piece:
    """A part, its value (None if it has no bytes to read), and the checkpoint's (None for padding)."""

    part: Part
    value: Tensor | None
    expected: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.value, self.expected) if tensor is not None)


class _Totals:
    """How much of what a rank had to hold of the checkpoint, for one root, lies in audited tensors."""

    def __init__(self, root: str, audited: set[str]) -> None:
        self._root = root
        self._audited = audited  # paths of enumerated tensors with bytes and digest
        self._wanted: dict[tuple[str, Region], int] = {}
        self._covered: set[tuple[str, Region]] = set()

    def add(self, batch: Iterable[_Piece]) -> None:
        for piece in batch:
            if piece.part.source is None or piece.expected is None:
                continue
            key = (piece.part.source, piece.part.region)
            self._wanted[key] = piece.expected.nbytes
            if piece.part.tensor in self._audited and piece.value is not None and piece.value.nbytes:
                self._covered.add(key)

    def record(self) -> Record:
        return {
            "root": self._root,
            "bytes_expected": sum(self._wanted.values()),
            "bytes_audited": sum(self._wanted[key] for key in self._covered),
            "missing": sorted({name for name, _ in self._wanted.keys() - self._covered}),
        }


def _batches(parts: Iterable[Part], reader: CheckpointReader) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    nbytes = 0
    for part in parts:
        value = None if why_unreadable(part.value) else part.value
        expected = reader.slice(part.source, part.region) if part.source is not None else None
        if expected is not None and value is not None:
            expected = expected.to(value.device)  # a device hashes far faster than the host
        batch.append(_Piece(part, value, expected))
        nbytes += batch[-1].nbytes
        if nbytes >= _PARTS_AT_ONCE:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _part_records(batch: Sequence[_Piece]) -> Iterator[Record]:
    values = [piece.value for piece in batch]
    expected = [piece.expected for piece in batch]
    casts = [numeric_cast(piece.expected) if _is_scale(piece) else None for piece in batch]
    digests = _digests_of([*values, *expected, *casts])
    for i, piece in enumerate(batch):
        value, slice_, cast = digests[i :: len(batch)]
        yield {
            "tensor": piece.part.tensor,
            "part": piece.part.name,
            "fp": value.fp if value else None,
            "expected": slice_.fp if slice_ else None,
            "cast": cast.fp if cast else None,
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


def _is_scale(piece: _Piece) -> bool:
    """Whether the part is E8M0 exponents, which a careless copy converts as numbers."""
    name, expected = piece.part.source, piece.expected
    return (
        name is not None
        and name.endswith("weight_scale")
        and expected is not None
        and expected.dtype in (torch.uint8, torch.float8_e8m0fnu)
    )


def numeric_cast(scales: Tensor | None) -> Tensor | None:
    """E8M0 bytes converted to uint8 as numbers, the way `copy_` does: 2^-7 becomes 0, 2^3 becomes 8."""
    return None if scales is None else scales.view(torch.float8_e8m0fnu).to(torch.uint8)
