"""Cuts tensors into leaves, contiguous runs of logical bytes, and digests each through the sums of its rows.

Contiguous memory is read where it lies. Strided tensors are made contiguous a piece at a time. Small
leaves wait until enough of equal length are there to be hashed by the same few operations. Those on a GPU all wait
for `collectors.device_sums`, whose kernels read them wherever they lie.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from collectors.byte_flags import constant_rows
from collectors.device_sums import DeviceSums
from collectors.row_sums import GROUP, GROUP_BYTES, MOST_BYTES, ROW_BYTES, SUM_BYTES, SUMS, fold, row_sums
from workloads import heartbeat

_SMALL = 32 << 10  # bytes of a leaf that is hashed together with others
_GROUP = 512 << 10  # bytes of small leaves hashed together
_PIECE = 4 << 20  # bytes made contiguous or padded at a time; a multiple of ROW_BYTES
_SUMS_AT_ONCE = 4 << 20  # bytes of sums, of 256 MiB of leaves
_PIECE_ON_DEVICE = 256 << 20  # launches cost more there than memory does
_Group = tuple[torch.dtype, int]  # of small leaves: dtype, bytes of each
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
        self._waiting: dict[_Group, list[tuple[int, Tensor]]] = {}
        self._sums: dict[int, list[tuple[Sequence[int], Tensor]]] = {}  # by bytes of a leaf
        self._sum_bytes = 0
        self._devices: dict[torch.device, DeviceSums] = {}

    def add(self, tensor: Tensor, slices: int) -> int:
        """Leaves for the `slices` leading slices of `tensor`, or with 0 one for the whole; returns the first's
        number. The tensor must be readable, and must live unchanged until `flush`."""
        heartbeat.advance()
        first, count = len(self.digests), slices or 1
        self.digests += [EMPTY] * count
        self.nan += [False] * count
        self.constants += [-1] * count
        nbytes = tensor.nbytes // count
        if nbytes == 0:
            return first
        if on_device(tensor) and _is_plain(tensor):
            self._device(tensor).add(range(first, first + count), tensor, nbytes, copied=False)
        elif not slices and nbytes <= _SMALL and _is_plain(tensor):
            self._wait(first, tensor, nbytes)
        elif _is_plain(tensor):
            self._contiguous(range(first, first + count), octets(tensor).view(count, nbytes), tensor.dtype)
        else:
            self._strided(range(first, first + count), tensor if slices else tensor.unsqueeze(0), nbytes)
        return first

    def flush(self) -> None:
        for group in list(self._waiting):
            self._flush(group)
        self._digest()
        for device in self._devices.values():
            for summed in device.results():
                digests = map(_digest, summed.sums, summed.nbytes)
                for leaf, digest, nan, constant in zip(
                    summed.leaves, digests, summed.nan, summed.constants, strict=True
                ):
                    self.digests[leaf], self.nan[leaf], self.constants[leaf] = digest, nan, constant

    def _device(self, tensor: Tensor) -> DeviceSums:
        if tensor.device not in self._devices:
            if tensor.device.type not in ("cuda", "cpu"):
                raise ValueError(
                    f"Tensors on {tensor.device} cannot be fingerprinted there, only on a CPU and on CUDA devices: "
                    "fingerprint their copies on the CPU."
                )
            self._devices[tensor.device] = DeviceSums(tensor.device, self._flags)
        return self._devices[tensor.device]

    def _wait(self, leaf: int, tensor: Tensor, nbytes: int) -> None:
        group = (tensor.dtype, nbytes)
        waiting = self._waiting.setdefault(group, [])
        waiting.append((leaf, tensor))
        if len(waiting) * _padded(nbytes) >= _GROUP:
            self._flush(group)

    def _flush(self, group: _Group) -> None:
        dtype, nbytes = group
        leaves, tensors = zip(*self._waiting.pop(group), strict=True)
        padded = torch.zeros((len(tensors), _padded(nbytes)), dtype=torch.uint8)
        address, width = padded.data_ptr(), padded.shape[1]
        for tensor in tensors:  # a tenth of the time of views and copy_
            ctypes.memmove(address, tensor.data_ptr(), nbytes)
            address += width
        self._rows(leaves, padded, nbytes, dtype)

    def _strided(self, leaves: Sequence[int], slices: Tensor, nbytes: int) -> None:
        piece = _piece(slices)
        step = piece // nbytes
        if step == 0:  # a slice exceeds the bound
            for leaf, part in zip(leaves, slices, strict=True):
                pieces = _contiguous_pieces(part, piece)
                if on_device(part):
                    whole = _cut_at(GROUP_BYTES, pieces)
                    self._device(part).add_pieces(leaf, whole, part.dtype, nbytes)
                else:
                    self._leaf(leaf, _cut_at(ROW_BYTES, pieces), part.dtype, nbytes)
        for start in range(0, len(leaves), step) if step else ():
            part = _materialize(slices[start : start + step])
            if on_device(part):
                self._device(part).add(leaves[start : start + step], part, nbytes, copied=True)
            else:
                self._contiguous(leaves[start : start + step], octets(part).view(-1, nbytes), part.dtype)

    def _contiguous(self, leaves: Sequence[int], octets_: Tensor, dtype: torch.dtype) -> None:
        """`leaves` are the rows of uint8 [n, nbytes]."""
        nbytes, piece = octets_.shape[1], _PIECE
        missing = -nbytes % ROW_BYTES
        if missing and (len(leaves) == 1 or nbytes > piece):
            for leaf, row in zip(leaves, octets_, strict=True):
                self._leaf(leaf, [row], dtype, nbytes)
            return
        # Padding copies a piece; without it only the sums take memory, a 64th.
        step = max(1, (piece if missing else piece * ROW_BYTES // SUM_BYTES) // nbytes)
        for start in range(0, len(leaves), step):
            part = octets_[start : start + step]
            padded = pad(part, (0, missing)) if missing else part
            self._rows(leaves[start : start + step], padded, nbytes, dtype)

    def _rows(self, leaves: Sequence[int], padded: Tensor, nbytes: int, dtype: torch.dtype) -> None:
        """Leaves of nbytes each from uint8 [n, bytes], whole rows of ROW_BYTES, zero behind nbytes."""
        count = len(leaves)
        sums, nan = row_sums(padded.view(-1, ROW_BYTES), 0, dtype if self._flags else None)
        self._summed(leaves, sums.view(torch.uint8).view(count, -1), nbytes)
        has_nan = nan.view(count, -1).any(1).tolist()
        constants = constant_rows(padded[:, :nbytes]) if self._flags else [-1] * count
        for i, leaf in enumerate(leaves):
            self.nan[leaf], self.constants[leaf] = has_nan[i], constants[i]

    def _leaf(self, leaf: int, pieces: Iterable[Tensor], dtype: torch.dtype, nbytes: int) -> None:
        """One leaf from its bytes in order: uint8 [k], k a multiple of ROW_BYTES except in the last."""
        sums: list[Tensor] = []
        constants: set[int] = set()
        for piece in pieces:
            whole = len(piece) // ROW_BYTES * ROW_BYTES
            rest = pad(piece[whole:], (0, -len(piece) % ROW_BYTES))
            for part in (piece[:whole], rest):
                part_sums, nan = row_sums(part.view(-1, ROW_BYTES), 0, dtype if self._flags else None)
                sums.append(part_sums)
                self.nan[leaf] |= bool(nan.any())
            constants.update(constant_rows(piece.unsqueeze(0)) if self._flags else [-1])
        self._summed([leaf], torch.cat(sums).view(torch.uint8).view(1, -1), nbytes)
        self.constants[leaf] = constants.pop() if len(constants) == 1 else -1

    def _summed(self, leaves: Sequence[int], sums: Tensor, nbytes: int) -> None:
        """Keeps sums until there are many: their digests between products would cost the threads' time."""
        self._sums.setdefault(nbytes, []).append((leaves, sums))
        self._sum_bytes += sums.nbytes
        if self._sum_bytes >= _SUMS_AT_ONCE:
            self._digest()

    def _digest(self) -> None:
        for nbytes, waiting in self._sums.items():
            digests = _digests(_joined([sums for _, sums in waiting]), nbytes)
            for leaf, digest in zip(
                chain.from_iterable(leaves for leaves, _ in waiting), digests, strict=True
            ):
                self.digests[leaf] = digest
        self._sums.clear()
        self._sum_bytes = 0


def on_device(tensor: Tensor) -> bool:
    """Whether the kernels read it."""
    return not tensor.is_cpu


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes], without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def _digests(sums: Tensor, nbytes: int) -> list[bytes]:
    """16 bytes for each of n leaves of nbytes from their sums in order, little-endian: uint8 [n, k]."""
    level = 0
    while sums.shape[1] > MOST_BYTES:
        groups = _whole(sums, GROUP * SUM_BYTES).view(torch.int32).view(len(sums), -1, SUMS)
        sums = fold(groups, level).view(torch.uint8).view(len(sums), -1)
        if sums.shape[1] <= MOST_BYTES:
            break
        level += 1
        rows = _whole(sums, ROW_BYTES).view(-1, ROW_BYTES)
        sums = row_sums(rows, level)[0].view(torch.uint8).view(len(sums), -1)
    data, width = sums.numpy().tobytes(), sums.shape[1]
    return [_digest(data[i : i + width], nbytes) for i in range(0, len(data), width)]


def _digest(sums: bytes, nbytes: int) -> bytes:
    """16 bytes, of a leaf of nbytes with these last sums."""
    return hashlib.sha256(sums + nbytes.to_bytes(8, "little")).digest()[:16]


def _joined(sums: Sequence[Tensor]) -> Tensor:
    """Of uint8 [n, k] each, in order. One thread does this sooner than several can be woken for it."""
    return sums[0] if len(sums) == 1 else torch.from_numpy(np.concatenate([part.numpy() for part in sums]))


def _whole(sums: Tensor, unit: int) -> Tensor:
    """uint8 [n, k] with zeros behind, k a multiple of `unit`."""
    missing = -sums.shape[1] % unit
    return torch.from_numpy(np.pad(sums.numpy(), ((0, 0), (0, missing)))) if missing else sums


def _padded(nbytes: int) -> int:
    return -(-nbytes // ROW_BYTES) * ROW_BYTES


def _piece(tensor: Tensor) -> int:
    return _PIECE_ON_DEVICE if on_device(tensor) else _PIECE


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the logical bytes as they are: no strides, no lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _materialize(part: Tensor) -> Tensor:
    """A contiguous copy. Made in memory order first, then transposed: six times as fast where rows are strided."""
    dtype = part.dtype
    if dtype.itemsize == 1:  # torch copies bytes everywhere, and not every dtype that it has
        part = part.view(torch.uint8)
    order = sorted(range(part.ndim), key=lambda dim: -part.stride()[dim])
    dense = part.resolve_conj().resolve_neg().permute(order).contiguous()
    return dense.permute([order.index(dim) for dim in range(part.ndim)]).contiguous().view(dtype)


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


def _cut_at(unit: int, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same bytes, cut at multiples of `unit`."""
    rest: Tensor | None = None
    for piece in pieces:
        data = piece if rest is None else torch.cat([rest, piece])
        whole = len(data) // unit * unit
        if whole:
            yield data[:whole]
        rest = data[whole:].clone() if whole < len(data) else None
    if rest is not None:
        yield rest
