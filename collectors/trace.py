"""Finds storages that a forward pass reads and no walk of the modules reaches, such as kernels' workspaces."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from collectors.walk import storage_address


@dataclass(frozen=True, slots=True)
class SeenStorage:
    """A storage that existed before the traced forward: where it is, and the first op that read it."""

    address: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: str
    weak: StorageWeakRef

    def record(self) -> dict[str, Any]:
        """The `unreachable` record."""
        return {
            "storage": self.address,
            "nbytes": self.nbytes,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": self.shape,
            "op": self.op,
        }


class StorageTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Context manager around one forward, on the thread that runs it.

    Notes the storage of every tensor that an operation takes and that no operation of the trace made. Only
    weak references are kept, which also keep a freed storage's identity from being given to another.
    Kernels called past the dispatcher (Triton, raw pointers) are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._seen: dict[int, SeenStorage | None] = {}  # None: made by an operation of the trace
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, str(func))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, None)
        return result

    def _note(self, tensor: Tensor, op: str | None) -> None:
        address = storage_address(tensor)
        if address == 0:
            return
        weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # as above
        if weak.cdata in self._seen:
            return
        nbytes = tensor.untyped_storage().nbytes()
        if op is None:
            self._made.append(weak)
            self._seen[weak.cdata] = None
        else:
            shape = tuple(tensor.shape)
            self._seen[weak.cdata] = SeenStorage(address, nbytes, tensor.dtype, shape, op, weak)

    def unreachable(self, reached: Container[int]) -> list[SeenStorage]:
        """Storages of the trace, still alive now, whose address is not in `reached`; in order of first use."""
        return [
            seen
            for seen in self._seen.values()
            if seen and seen.address not in reached and not _expired(seen.weak)
        ]


def _expired(weak: StorageWeakRef) -> bool:
    return bool(weak.expired())  # type: ignore[no-untyped-call]  # as above


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
