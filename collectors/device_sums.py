"""Sums of rows on a GPU: tables of many leaves, a few launches for all of them, nothing read back until the end."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from collectors.byte_flags import NAN_WORDS, NO_NAN, Array
from collectors.row_sums import FOLD_BYTES, GROUP, GROUP_BYTES, MOST_BYTES, SUMS, factors, keys
from collectors.row_table import ALIGNMENT, Rows, is_folded, spread, stored_bytes, tables

BLOCK, STEP, STAGES, WARPS = 64, 256, 4, 4  # of the kernel: the fastest of those tried on an H200
_COPIES_AT_ONCE = 1 << 30  # bytes of copies, made of strided tensors, that wait for a launch
_KINDS: dict[torch.dtype, int] = {dtype: 1 + i for i, dtype in enumerate(NAN_WORDS)}  # 0: no NaN to look for
_WIDE = (torch.float64, torch.complex128)  # of more than the kernel's words


class Summed(NamedTuple):
    """Of n leaves: number, bytes, last sums in order, whether NaN occurs, the byte that repeats or -1."""

    leaves: list[int]
    nbytes: list[int]
    sums: list[bytes]
    nan: list[bool]
    constants: list[int]


@dataclass(slots=True)
class _Waiting:
    """Leaves that are not launched yet, in groups of equal length that follow each other in memory."""

    numbers: list[int] = field(default_factory=list)
    groups: list[tuple[int, int, int, int]] = field(default_factory=list)  # address, count, bytes, kind
    wide: list[tuple[int, Tensor]] = field(default_factory=list)  # first leaf; which of those behind hold NaN
    kept: list[Tensor] = field(default_factory=list)
    copied: int = 0


class DeviceSums:
    """Leaves of one device in order of `add`. flags=False: NaN and constant bytes are not looked for."""

    def __init__(self, device: torch.device, flags: bool) -> None:
        self._device = device
        self._flags = flags
        self._waiting = _Waiting()
        self._launched: list[_Launched] = []

    def add(self, leaves: Sequence[int], tensor: Tensor, nbytes: int, copied: bool) -> None:
        """`leaves` of nbytes each that lie one behind another in a contiguous tensor, which must not change until
        `results`. copied: it exists for this call only."""
        waiting = self._waiting
        if waiting.copied >= _COPIES_AT_ONCE:
            self._launch()
            waiting = self._waiting
        if self._flags and tensor.dtype in _WIDE:
            octets = tensor.reshape(-1).view(torch.uint8).view(len(leaves), nbytes)
            waiting.wide.append((len(waiting.numbers), _nan_rows(octets)))
        kind = _KINDS.get(tensor.dtype, 0)
        waiting.groups.append((tensor.data_ptr(), len(leaves), nbytes, kind))
        waiting.numbers += leaves
        waiting.kept.append(tensor)
        waiting.copied += tensor.nbytes if copied else 0

    def add_pieces(self, leaf: int, pieces: Iterable[Tensor], dtype: torch.dtype, nbytes: int) -> None:
        """One leaf of more than GROUP_BYTES from its bytes in order: uint8 [k], k a multiple of GROUP_BYTES except in
        the last. Each is read before the next is made, so that the next may take its memory."""
        whole = np.array([nbytes])
        sums = _Sums.of(whole, self._device)
        flags = torch.zeros((1, 3), dtype=torch.uint8, device=self._device)
        first, done = flags, 0
        for piece in pieces:
            if not done:
                first = piece[:1].clone()
            target = int(sums.target[0]) + done // GROUP_BYTES * FOLD_BYTES
            place = (piece.data_ptr(), len(piece), target, first.data_ptr(), 0, _KINDS.get(dtype, 0))
            self._run(Rows(*(np.array([value]) for value in (*place, True))), 0, flags)
            if self._flags and dtype in _WIDE:
                flags[:, 0] |= _nan_rows(piece.unsqueeze(0))
            done += len(piece)
        self._reduce(sums)
        self._launched.append(_Launched([leaf], whole, sums, flags))

    def results(self) -> Iterator[Summed]:
        """Of every leaf. Waits for the device."""
        self._launch()
        for leaves, nbytes, sums, flags in self._launched:
            last, marks = sums.last.cpu().numpy().tobytes(), flags.cpu().numpy()
            ends = np.cumsum(sums.last_bytes).tolist()
            parts = [last[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
            constant = np.where((marks[:, 1] == 0) & self._flags, marks[:, 2].astype(np.int64), -1)
            yield Summed(leaves, nbytes.tolist(), parts, (marks[:, 0] != 0).tolist(), constant.tolist())
        self._launched.clear()

    def _launch(self) -> None:
        """Queues the kernels for all leaves that wait."""
        waiting, self._waiting = self._waiting, _Waiting()
        if not waiting.groups:
            return
        base, count, nbytes, kind = np.array(waiting.groups, np.int64).T
        group, within = spread(count)
        nbytes = nbytes[group]
        address, number = base[group] + within * nbytes, np.arange(len(group))
        sums = _Sums.of(nbytes, self._device)
        flags = torch.zeros((len(group), 3), dtype=torch.uint8, device=self._device)
        folded = is_folded(nbytes)
        self._run(Rows(address, nbytes, sums.target, address, number, kind[group], folded), 0, flags)
        for first, nan in waiting.wide:
            flags[first : first + len(nan), 0] |= nan
        self._reduce(sums)
        self._launched.append(_Launched(waiting.numbers, nbytes, sums, flags))

    def _reduce(self, sums: "_Sums") -> None:
        """Hashes sums that are not the last ones, as the bytes of leaves with the keys of the next level."""
        level, target, nbytes, last = 0, sums.target, sums.stored, sums.last_address
        alive = [sums.scratch]  # until what reads it is queued
        while (more := nbytes > MOST_BYTES).any():
            level += 1
            address, last, nbytes = target[more], last[more], nbytes[more]
            none = np.zeros(len(nbytes), np.int64)
            folded, stored = is_folded(nbytes), stored_bytes(nbytes)
            target, scratch = _targets(stored, last, self._device)
            alive.append(scratch)
            self._run(Rows(address, nbytes, target, address, none, none, folded), level, None)
            nbytes = stored

    def _run(self, rows: Rows, level: int, flags: Tensor | None) -> None:
        """Sums of `rows` with the keys of `level`; marks in `flags` uint8 [leaves, 3] what their bytes show."""
        try:
            from triton.runtime import JITFunction

            from collectors.row_sums_kernel import row_sums_kernel
        except ImportError as error:
            raise RuntimeError(
                f"Tensors on {self._device} are fingerprinted by a Triton kernel, but {error}: install the triton that "
                "belongs to this torch."
            ) from error
        key = keys(level, self._device)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for table in tables(rows, key.data_ptr(), BLOCK):
                row_sums_kernel[(len(table.kinds),)](
                    _uploaded(table.columns, self._device),
                    table.columns.shape[1],
                    _uploaded(table.kinds, self._device),
                    _nan_table(self._device),
                    key,
                    factors(level, self._device),
                    _repeated(self._device),
                    flags,
                    ROWS=table.rows,
                    ALIGN=table.align,
                    FOLD=table.rows == GROUP,
                    FLAGS=self._flags and flags is not None,
                    PACKED=table.align == ALIGNMENT and isinstance(row_sums_kernel, JITFunction),
                    BLOCK=BLOCK,
                    STEP=STEP,
                    STAGES=STAGES,
                    num_warps=WARPS,
                )


class _Sums(NamedTuple):
    """Of n leaves: where the sums go that the first launches store and how many bytes those take, and the same of the
    last ones, which are not hashed again. They lie in `scratch` or `last`, uint8."""

    target: Array
    stored: Array
    scratch: Tensor
    last: Tensor
    last_address: Array
    last_bytes: Array

    @classmethod
    def of(cls, nbytes: Array, device: torch.device) -> "_Sums":
        stored = stored_bytes(nbytes)
        last_bytes = stored
        while (more := last_bytes > MOST_BYTES).any():
            last_bytes = np.where(more, stored_bytes(last_bytes), last_bytes)
        last = torch.empty(int(last_bytes.sum()), dtype=torch.uint8, device=device)
        last_address = _addresses(last, last_bytes)
        target, scratch = _targets(stored, last_address, device)
        return cls(target, stored, scratch, last, last_address, last_bytes)


class _Launched(NamedTuple):
    numbers: list[int]
    nbytes: Array
    sums: _Sums
    flags: Tensor  # uint8 [leaves, 3]: NaN, not constant, first byte


def _addresses(memory: Tensor, nbytes: Array) -> Array:
    return memory.data_ptr() + np.cumsum(nbytes) - nbytes


def _targets(nbytes: Array, last: Array, device: torch.device) -> tuple[Array, Tensor]:
    """Where sums of nbytes go: to `last`, or to memory to be hashed again from, which is returned beside it."""
    more = nbytes > MOST_BYTES
    scratch = torch.empty(int(nbytes[more].sum()), dtype=torch.uint8, device=device)
    target = last.copy()
    target[more] = _addresses(scratch, nbytes[more])
    return target, scratch


def _nan_rows(octets: Tensor) -> Tensor:
    """bool [n] for rows of bytes of float64: uint8 [n, k]."""
    return octets.view(torch.float64).amax(1).isnan()


def _uploaded(array: Array, device: torch.device) -> Tensor:
    """A copy that is queued: from memory that is not pinned, it would wait for the kernels before it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@lru_cache(maxsize=32)
def _nan_table(device: torch.device) -> Tensor:
    """int32 [kinds, 5]: by kind, the words that find its NaN."""
    words = np.array([NO_NAN, *NAN_WORDS.values()], np.uint32)
    return torch.from_numpy(words.view(np.int32)).to(device)


@lru_cache(maxsize=32)
def _repeated(device: torch.device) -> Tensor:
    """int32 [ROW_BYTES + 1, SUMS]: sums of a row whose first i bytes are 1 and the others 0."""
    columns = keys(0, torch.device("cpu")).to(torch.int32)
    return torch.cat([columns.new_zeros(1, SUMS), columns.cumsum(0, dtype=torch.int32)]).to(device)
