"""Holds the parts of an engine's tensors against the checkpoint, and says how much of it the audit covers."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from collectors.byte_order import counts_of_bytes, flat_bytes, rows_too_early
from collectors.fingerprint import Digest, fingerprints, why_unreadable
from collectors.row_index import as_dtype
from workloads.engines.protocol import Part

Record = dict[str, Any]
Region = tuple[tuple[int, int], ...]

_PARTS_AT_ONCE = 256 << 20  # bytes of parts and of their checkpoint slices held while they are hashed


class CheckpointReader(Protocol):
    """The part of a checkpoint reader that the audit needs."""

    def slice(self, name: str, region: Region) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """Digest of one slice of the checkpoint, and what it would be after `numeric_cast` (scales only)."""

    fp: str
    cast: str | None
    nbytes: int


ReadAs = torch.dtype | Callable[[Tensor], Tensor] | None
_Key = tuple[str, Region, ReadAs]  # tensor, part of it, what it is read as
Slices = dict[_Key, Slice]  # of one checkpoint


def audit_parts(
    root: str, parts: Iterable[Part], audited: set[str], reader: CheckpointReader, slices: Slices
) -> Iterator[tuple[str, Record]]:
    """(kind, record) of every part of one root, and last the totals of its sources.

    audited: paths of enumerated tensors that have bytes and a digest. slices: what is known of the checkpoint behind
    `reader`; what had to be read is added to it.
    """
    totals = _Totals(root, audited, slices)
    for batch in _batches(parts, reader, slices):
        for record in _part_records(batch, slices, reader):
            yield "part", record
        totals.add(batch)
    yield "source", totals.record()


@dataclass(slots=True)
class _Piece:
    """A part, its value (None if it has no bytes to read), and the checkpoint's where it was read just now, with its
    bytes as stored."""

    part: Part
    value: Tensor | None
    read: Tensor | None
    stored: int = 0

    @property
    def key(self) -> _Key | None:
        """Which slice of the checkpoint the part must equal, None for padding."""
        part = self.part
        return None if part.source is None else (part.source, part.region, part.read_as)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.value, self.read) if tensor is not None)


class _Totals:
    """How much of what a rank had to hold of the checkpoint, for one root, lies in audited tensors."""

    def __init__(self, root: str, audited: set[str], slices: Slices) -> None:
        self._root = root
        self._slices = slices
        self._audited = audited
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
            "missing": sorted({name for name, *_ in self._wanted.keys() - self._covered}),
        }


def _batches(parts: Iterable[Part], reader: CheckpointReader, known: Slices) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    nbytes = 0
    for part in parts:
        value = None if why_unreadable(part.value) else part.value
        piece = _Piece(part, value, None)
        if piece.key is not None and piece.key not in known:
            name, region, dtype = piece.key
            read = reader.slice(name, region)
            piece.stored = read.nbytes
            piece.read = read if dtype is None else as_dtype(read, dtype)
            if value is not None:
                piece.read = piece.read.to(value.device)  # a device hashes far faster than the host
        batch.append(piece)
        nbytes += batch[-1].nbytes
        if nbytes >= _PARTS_AT_ONCE:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _slice(reader: CheckpointReader, key: _Key) -> Tensor:
    """A slice of the checkpoint, as the live tensor should hold it."""
    name, region, dtype = key
    read = reader.slice(name, region)
    return read if dtype is None else as_dtype(read, dtype)


def _part_records(batch: Sequence[_Piece], slices: Slices, reader: CheckpointReader) -> Iterator[Record]:
    """Records of a batch; the digests of what was read for it are left in `slices`. A part that is not what it
    should be is looked at once more: are its bytes the right ones in another order?"""
    new = [(p.key, p.read, p.stored) for p in batch if p.key is not None and p.read is not None]
    casts = [numeric_cast(read) if _is_scale(key, read) else None for key, read, _ in new]
    digests = _digests_of([*(piece.value for piece in batch), *(read for _, read, _ in new), *casts])
    values, fresh = digests[: len(batch)], digests[len(batch) :]
    for i, (key, _, stored) in enumerate(new):
        digest, cast = fresh[i :: len(new)]
        assert digest is not None, "a slice that was read has a digest"
        slices[key] = Slice(digest.fp, cast.fp if cast else None, stored)
    wrong = [_is_wrong(piece, value, slices) for piece, value in zip(batch, values, strict=True)]
    rearranged = _rearranged(batch, wrong, reader)
    for piece, value, is_wrong in zip(batch, values, wrong, strict=True):
        padding = _number(piece.part.padding_value)
        expected = slices[piece.key] if piece.key is not None else None
        differs = is_wrong and expected is not None
        permuted, patch, shift, decayed = (
            _how_it_differs(piece, reader) if differs else (False, None, 0, False)
        )
        yield {
            "tensor": piece.part.tensor,
            "part": piece.part.name,
            "fp": value.fp if value else None,
            "expected": expected.fp if expected else None,
            "cast": expected.cast if expected else None,
            "permuted": permuted,
            "patch": patch,
            **({"shifted": shift} if shift else {}),
            **({"decayed": True} if decayed else {}),
            **({"rearranged": True} if is_wrong and piece.part.tensor in rearranged else {}),
            "source": piece.part.source,
            "region": piece.part.region,
            "nbytes": piece.value.nbytes if piece.value is not None else 0,
            "const": padding if _holds_its_number(piece) else value and value.const,
            "padding_value": padding,
        }


def _is_wrong(piece: _Piece, value: Digest | None, slices: Slices) -> bool:
    """Whether a part is not its checkpoint slice, or padding not the value that it was created with."""
    if value is None:
        return False
    if piece.key is not None:
        return value.fp != slices[piece.key].fp
    padding = piece.part.padding_value
    return padding is not None and not _holds_its_number(piece) and value.const != padding


def _number(value: float | None) -> float | str | None:
    """What padding was created with, as JSON can say it: `-inf` as text."""
    return value if value is None or math.isfinite(value) else str(value)


def _holds_its_number(piece: _Piece) -> bool:
    """Whether every element of padding is the float that it was created with, whose bytes need not all be equal."""
    number, value = piece.part.padding_value, piece.value
    if not number or value is None or not value.is_floating_point() or value.dtype == torch.float8_e8m0fnu:
        return False
    return bool((value.to(torch.float64) == number).all())


def _how_it_differs(piece: _Piece, reader: CheckpointReader) -> tuple[bool, int | None, int, bool]:
    """Whether every byte value occurs as often in the live part as in its checkpoint slice; the value of all bytes that
    differ, None where they are not of one value; how many rows too early the live rows are, 0 where they are not the
    slice's; and `is_decay_of`."""
    assert piece.key is not None, "only parts with a source are held against the checkpoint"
    assert piece.value is not None, "only parts with bytes are held against the checkpoint"
    checkpoint = _slice(reader, piece.key)
    live, wanted = flat_bytes(piece.value), flat_bytes(checkpoint)
    wrong = live[live != wanted] if live.shape == wanted.shape else live
    patch = int(wrong[0]) if len(wrong) and bool((wrong == wrong[0]).all()) else None
    shift = rows_too_early(live, wanted, checkpoint.shape) if live.shape == wanted.shape else 0
    permuted = torch.equal(counts_of_bytes(live), counts_of_bytes(wanted))
    return permuted, patch, shift, is_decay_of(piece.value, checkpoint)


def is_decay_of(live: Tensor, logarithms: Tensor) -> bool:
    """Whether every element is -exp of its own in the checkpoint, which a kernel that takes the logarithms of decays
    applies itself. To within a few steps of the type: another library's exponential may round otherwise."""
    if live.dim() != 1 or live.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if live.shape != logarithms.shape or not logarithms.is_floating_point():
        return False
    expected = -logarithms.to(torch.float64).exp()
    return torch.allclose(live.to(torch.float64), expected, rtol=4 * torch.finfo(live.dtype).eps, atol=0.0)


def _rearranged(batch: Sequence[_Piece], wrong: Sequence[bool], reader: CheckpointReader) -> set[str]:
    """Tensors whose bytes, padding included, are the right ones in another order, so that padding is wrong and what
    should be in it lies elsewhere. wrong: of each piece, whether it is not what it should be."""
    suspects = {p.part.tensor for p, bad in zip(batch, wrong, strict=True) if bad and p.key is None}
    found = set()
    for tensor in suspects:
        pieces = [piece for piece in batch if piece.part.tensor == tensor and piece.value is not None]
        live = sum(counts_of_bytes(flat_bytes(piece.value)) for piece in pieces if piece.value is not None)
        wanted = sum(counts_of_bytes(flat_bytes(_should_be(piece, reader))) for piece in pieces)
        if bool((torch.as_tensor(live) == wanted).all()):
            found.add(tensor)
    return found


def _should_be(piece: _Piece, reader: CheckpointReader) -> Tensor:
    if piece.key is not None:
        return _slice(reader, piece.key)
    assert piece.value is not None, "only parts with bytes are held against what they should be"
    return torch.full_like(piece.value, piece.part.padding_value or 0)


def _digests_of(tensors: Sequence[Tensor | None]) -> list[Digest | None]:
    """Whole: an expert's matrix has one digest, be it 2-D in the checkpoint or a slice of a live 3-D tensor."""
    digests = iter(fingerprints((t for t in tensors if t is not None), whole=True))
    return [None if tensor is None else next(digests) for tensor in tensors]


def _is_scale(key: _Key, slice_: Tensor) -> bool:
    """Whether a slice is E8M0 exponents, which a careless copy converts as numbers."""
    named = key[0].endswith(("weight_scale", "_scales", ".scale"))
    return slice_.dtype is torch.float8_e8m0fnu or (named and slice_.dtype is torch.uint8)


def numeric_cast(scales: Tensor) -> Tensor:
    """E8M0 bytes converted to uint8 as numbers, the way `copy_` does: 2^-7 becomes 0, 2^3 becomes 8."""
    return scales.view(torch.float8_e8m0fnu).to(torch.uint8)
