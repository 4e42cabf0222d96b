"""Cuts tensors into leaves, contiguous runs of logical bytes, and digests each through its block lanes.

Contiguous memory is read where it lies. Strided tensors are made contiguous a piece at a time. Small
leaves wait until enough of equal length are there to be hashed by the same few array operations.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from collectors.lanes import BLOCK_BYTES, RowHasher, Rows

_SMALL = 32 << 10  # bytes of a leaf that is hashed together with others
_GROUP = 512 << 10  # bytes of small leaves hashed together: they stay in the L2 cache
_PIECE = 8 << 20  # bytes made contiguous or aligned at a time; a multiple of BLOCK_BYTES
_PIECE_ON_DEVICE = 256 << 20  # launches cost more there than memory does
_Group = tuple[torch.device, torch.dtype, int]  # of small leaves: device, dtype, bytes of each
EMPTY = hashlib.sha256((0).to_bytes(8, "little")).digest()[:16]


class Leaves:
    """Leaves in order of `add`: 16-byte digests, whether NaN occurs, the byte that repeats or -1.

    Complete after `flush`. flags=False leaves the last two at False and -1.
    """

    def __init__(self, flags: bool) -> None:
        self.digests: list[bytes] = []
        self.nan: list[bool] = []
        self.constants: list[int] = []
        self._flags = flags
        self._hash_rows = RowHasher()
        self._waiting: dict[_Group, list[tuple[int, Tensor]]] = {}

    def add(self, tensor: Tensor, slices: int) -> int:
        """Leaves for the `slices` leading slices of `tensor`, or with 0 one for the whole; returns the first's
        number. The tensor must be readable, and must live unchanged until `flush`."""
        first, count = len(self.digests), slices or 1
        self.digests += [EMPTY] * count
        self.nan += [False] * count
        self.constants += [-1] * count
        nbytes = tensor.nbytes // count
        if nbytes == 0:
            return first
        if not slices and nbytes <= _SMALL and _is_plain(tensor):
            self._wait(first, tensor, nbytes)
        elif _is_plain(tensor):
            self._rows(range(first, first + count), octets(tensor).view(count, nbytes), tensor.dtype)
        else:
            self._strided(range(first, first + count), tensor if slices else tensor.unsqueeze(0), nbytes)
        return first

    def flush(self) -> None:
        for group in list(self._waiting):
            self._flush(group)

    def _wait(self, leaf: int, tensor: Tensor, nbytes: int) -> None:
        group = (tensor.device, tensor.dtype, nbytes)
        waiting = self._waiting.setdefault(group, [])
        waiting.append((leaf, tensor))
        if len(waiting) * nbytes >= (_GROUP if tensor.is_cpu else _PIECE_ON_DEVICE):
            self._flush(group)

    def _flush(self, group: _Group) -> None:
        device, dtype, nbytes = group
        numbers, tensors = zip(*self._waiting.pop(group), strict=True)
        if device.type == "cpu":
            rows = torch.zeros((len(tensors), _padded(nbytes)), dtype=torch.uint8)
            address, width = rows.data_ptr(), rows.shape[1]
            for tensor in tensors:  # a tenth of the time of views and copy_
                ctypes.memmove(address, tensor.data_ptr(), nbytes)
                address += width
            self._finish_rows(numbers, self._hash(rows.view(torch.int64), nbytes, dtype), nbytes)
        else:
            self._rows(numbers, torch.stack([octets(tensor) for tensor in tensors]), dtype)

    def _strided(self, own: range, slices: Tensor, nbytes: int) -> None:
        piece = _piece(slices)
        step = piece // nbytes
        if step == 0:  # a slice exceeds the bound
            for leaf, part in zip(own, slices, strict=True):
                self._leaf(leaf, _reblock(_contiguous_pieces(part, piece)), part.dtype, nbytes)
            return
        for start in range(0, len(own), step):
            part = _materialize(slices[start : start + step])
            rows = octets(part).view(-1, nbytes)
            self._rows(own[start : start + step], rows, slices.dtype)

    def _rows(self, own: Iterable[int], rows: Tensor, dtype: torch.dtype) -> None:
        """Leaves `own` are the rows of uint8 [n, nbytes], contiguous."""
        n, nbytes = rows.shape
        if nbytes > BLOCK_BYTES:
            for leaf, row in zip(own, rows, strict=True):
                self._leaf(leaf, torch.split(row, _piece(row)), dtype, nbytes)
            return
        own = list(own)
        step = max(1, _piece(rows) // nbytes)
        for start in range(0, n, step):
            part = rows[start : start + step]
            self._finish_rows(own[start : start + step], self._hash(_words(part), nbytes, dtype), nbytes)

    def _leaf(self, leaf: int, chunks: Iterable[Tensor], dtype: torch.dtype, nbytes: int) -> None:
        """One leaf from its bytes in order: uint8 [n] tensors, n a multiple of BLOCK_BYTES but for the last."""
        blocks = [self._blocks(part, dtype) for chunk in chunks for part in _whole_and_rest(chunk)]
        constants = {int(value) for rows in blocks for value in rows.constant}
        self.digests[leaf] = _digest(b"".join(rows.lanes.tobytes() for rows in blocks), nbytes)
        self.nan[leaf] = any(bool(rows.nan.any()) for rows in blocks)
        self.constants[leaf] = constants.pop() if len(constants) == 1 else -1

    def _blocks(self, rows: Tensor, dtype: torch.dtype) -> Rows:
        return self._hash(_words(rows), rows.shape[1], dtype)

    def _hash(self, words: Tensor, nbytes: int, dtype: torch.dtype) -> Rows:
        return self._hash_rows(words, nbytes, dtype if self._flags else None)

    def _finish_rows(self, own: Iterable[int], rows: Rows, nbytes: int) -> None:
        lanes = rows.lanes.tobytes()
        width = rows.lanes[0].nbytes
        flags = zip(own, rows.nan.tolist(), rows.constant.tolist(), strict=True)
        for i, (leaf, nan, constant) in enumerate(flags):
            self.digests[leaf] = _digest(lanes[i * width : (i + 1) * width], nbytes)
            self.nan[leaf] = nan
            self.constants[leaf] = constant


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes], without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def _digest(lanes: bytes, nbytes: int) -> bytes:
    return hashlib.sha256(lanes + nbytes.to_bytes(8, "little")).digest()[:16]


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _piece(tensor: Tensor) -> int:
    return _PIECE if tensor.is_cpu else _PIECE_ON_DEVICE


def _words(rows: Tensor) -> Tensor:
    """uint8 [n, nbytes] as int64 [n, words]; a zero-padded copy where the words would not be aligned."""
    n, nbytes = rows.shape
    if nbytes % 8 == 0 and rows.storage_offset() % 8 == 0 and rows.data_ptr() % 8 == 0:
        return rows.view(torch.int64)
    padded = torch.zeros((n, _padded(nbytes)), dtype=torch.uint8, device=rows.device)
    padded[:, :nbytes] = rows
    return padded.view(torch.int64)


def _whole_and_rest(chunk: Tensor) -> Iterator[Tensor]:
    """uint8 [n] as rows of one block each, and one row of what is left."""
    whole = len(chunk) // BLOCK_BYTES * BLOCK_BYTES
    if whole:
        yield chunk[:whole].view(-1, BLOCK_BYTES)
    if whole < len(chunk):
        yield chunk[whole:].unsqueeze(0)


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the logical bytes as they are: no strides, no lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _materialize(part: Tensor) -> Tensor:
    """A contiguous copy. Made in memory order first, then transposed: six times as fast where rows are strided."""
    order = sorted(range(part.ndim), key=lambda dim: -part.stride()[dim])
    dense = part.resolve_conj().resolve_neg().permute(order).contiguous()
    return dense.permute([order.index(dim) for dim in range(part.ndim)]).contiguous()


def _contiguous_pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Bytes of a strided tensor in logical order, uint8 [n] with n <= `limit`."""
    row = tensor.nbytes // tensor.shape[0] if tensor.ndim else tensor.nbytes
    if tensor.nbytes <= limit or _is_plain(tensor):
        yield from torch.split(octets(_materialize(tensor)), limit)
    elif row > limit:
        for part in tensor:
            yield from _contiguous_pieces(part, limit)
    else:
        for part in torch.split(tensor, limit // row):
            yield octets(_materialize(part))


def _reblock(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same bytes, cut at multiples of BLOCK_BYTES."""
    rest: Tensor | None = None
    for piece in pieces:
        data = piece if rest is None else torch.cat([rest, piece])
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            yield data[:whole]
        rest = data[whole:].clone()
    if rest is not None and len(rest):
        yield rest
