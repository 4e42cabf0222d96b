"""Weights that leave the device and come back to the same addresses, as with a virtual memory allocator on a GPU.

On a CPU the pages of the weights are handed back to the kernel: addresses stay, resident memory goes, and whoever
reads them before they are filled again finds zeros. Level 1 keeps a copy beside them (on a CPU that takes the memory
that it frees; its life cycle is what is tested), level 2 none: only what no load would bring back survives it.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from workloads.loading.weights import POISON, ModelRoot

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


class Asleep:
    """Weights of `roots` and contents of `caches`, released until `wake`."""

    def __init__(self, roots: Iterable[ModelRoot], caches: Iterable[torch.Tensor], level: int) -> None:
        self.level = level
        weights = [tensor for root in roots for tensor in loaded_tensors(root)]
        self._weights = list(_storages(weights))
        self._kept = [storage.clone() for storage in self._weights] if level == 1 else []
        for storage in (*self._weights, *_storages(caches)):
            _release(storage)

    def wake(self) -> None:
        """The weights of level 1 are back; those of level 2 are anything until an update has brought all of them."""
        for storage, kept in zip(self._weights, self._kept, strict=False):
            storage.copy_(kept)
        self._kept = []


def loaded_tensors(root: ModelRoot) -> Iterator[torch.Tensor]:
    """What a load of the whole model brings back: parameters, what they were consumed into, and what is derived.
    Other buffers and attributes are not among them: no load would restore those."""
    for _, module in root.weight_modules():
        for name in module.weights:
            live = module.live(name)
            if live is not None:
                yield live
        holders = {
            holder.partition("[")[0].partition(".")[0] for holder, _ in module.consumed_weights().values()
        }
        for name in sorted(module.derived | holders):
            yield from _tensors(getattr(module, name, None))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The storages of tensors, each once, as bytes."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _release(storage: torch.Tensor) -> None:
    """Hand the whole pages of a storage back; bytes beside them, which other data may share a page with, are
    poisoned."""
    page, begin = mmap.PAGESIZE, storage.data_ptr()
    first, last = -(-begin // page) * page, (begin + storage.nbytes) // page * page
    if last <= first:
        storage.fill_(POISON)
        return
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise on {last - first} bytes of weights failed: {os.strerror(number)}")
    storage[: first - begin].fill_(POISON)
    storage[last - begin :].fill_(POISON)
