"""128-bit fingerprint of a tensor's logical bytes, the same on every device and for every stride.

The logical bytes are those of the row-major contiguous tensor. They are cut into leaves. A leaf is padded
with zeros to rows of 4 KiB, each of which is reduced to 16 integers (`collectors.row_sums`); where there are more than
64 rows, the sums of every 64 are folded into 16. Where those take more than 4 KiB, they are hashed again as the bytes
of a leaf, with other keys. A leaf's digest is the first 128 bits of SHA-256 over the last sums in order and the leaf's
length in bytes.

A tensor is one leaf, except with three dimensions or more and a first dimension of at most MAX_SLICES: then
every leading slice is a leaf, and the tensor's digest is SHA-256, cut alike, of the slices' digests. So a slice
has the fingerprint of the same bytes as a 2-D tensor, and a difference in stacked experts names the expert.

On the CPU the sums are a matrix product; on a GPU a kernel reads every byte once, at the speed of its memory, and
returns at most 4 KiB for each leaf (`collectors.device_sums`). The bits are the same.

Error model. Two tensors of equal size that differ, in whatever way, agree with probability below 2^-111 per level (two
levels reach 16 GiB, four 64 PiB), taken over keys that do not depend on them. Every flipped bit, and every swap, shift
or zeroed block of a large random sample, is tested to be seen, and 10^8 pairs of small inputs to have no collision. It
is not a defence against adversaries: the keys are public and sums are linear, so equal fingerprints can be
constructed. Shape and dtype do not enter, they are recorded beside it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from collectors.leaves import Leaves

MAX_SLICES = 4096


@dataclass(frozen=True, slots=True)
class Digest:
    """fp, and of each leading slice: 32 hex digits. const: the byte that all bytes equal, if they do."""

    fp: str
    slices: tuple[str, ...]
    const: int | None
    nan: bool


def fingerprint(tensor: Tensor) -> str:
    """32 hex digits over the logical bytes of `tensor`. Raises ValueError as `fingerprints` does."""
    return _digests([tensor], flags=False, whole=False)[0].fp


def fingerprints(tensors: Iterable[Tensor], whole: bool = False) -> list[Digest]:
    """Digests of many tensors in one pass; small ones are hashed in groups of equal size.

    whole: every tensor is one leaf whatever its dimensions, so that equal bytes in any shape have one digest.
    Temporary memory is bounded by a few pieces of `collectors.leaves` whatever the size of the tensors.
    Raises ValueError for tensors without bytes to read: meta, sparse, opaque, or with released storage.
    """
    return _digests(list(tensors), flags=True, whole=whole)


def why_unreadable(tensor: Tensor) -> str | None:
    """Why the bytes of `tensor` cannot be read, as the end of a sentence, or None if they can.

    Reads metadata only. The storage is measured: its address may dangle after `resize_(0)`.
    """
    if tensor.is_meta:
        return "it is on the meta device"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return f"its values are spread over bytes and a quantizer ({tensor.dtype})"
    nbytes = tensor.nbytes
    if nbytes == 0:
        return None
    if not tensor.is_contiguous():
        last = sum(
            (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        nbytes = (last + 1) * tensor.element_size()
    needed = tensor.storage_offset() * tensor.element_size() + nbytes
    try:
        storage = tensor.untyped_storage()
        held = storage.nbytes() if storage.data_ptr() else 0
    except (RuntimeError, NotImplementedError) as error:  # wrapper subclasses and fake tensors have none
        return f"it has no storage of its own ({str(error).splitlines()[0]})"
    return None if held >= needed else f"its storage holds {held} bytes of the {needed} that it spans"


def _digests(tensors: list[Tensor], flags: bool, whole: bool) -> list[Digest]:
    leaves = Leaves(flags)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        slices = [0 if whole else _slice_count(tensor) for tensor in tensors]
        first = [leaves.add(_readable(tensor), count) for tensor, count in zip(tensors, slices, strict=True)]
        leaves.flush()
    return [_combine(leaves, start, count) for start, count in zip(first, slices, strict=True)]


def _readable(tensor: Tensor) -> Tensor:
    reason = why_unreadable(tensor)
    if reason:
        raise ValueError(
            f"A {tensor.dtype} tensor of shape {tuple(tensor.shape)} has no bytes to fingerprint: {reason}. "
            "Fingerprint the tensors that it is made of, or load it first."
        )
    return tensor


def _slice_count(tensor: Tensor) -> int:
    """How many leading slices are leaves of their own; 0: the tensor is one leaf."""
    return tensor.shape[0] if tensor.ndim >= 3 and tensor.shape[0] <= MAX_SLICES else 0


def _combine(leaves: Leaves, start: int, count: int) -> Digest:
    if count == 0:
        constant = leaves.constants[start]
        return Digest(leaves.digests[start].hex(), (), constant if constant >= 0 else None, leaves.nan[start])
    own = slice(start, start + count)
    digests, constants = leaves.digests[own], set(leaves.constants[own])
    constant = constants.pop() if len(constants) == 1 else -1
    return Digest(
        fp=hashlib.sha256(b"".join(digests)).hexdigest()[:32],
        slices=tuple(digest.hex() for digest in digests),
        const=constant if constant >= 0 else None,
        nan=any(leaves.nan[own]),
    )
