"""Finds every tensor that can be reached from an engine's root modules, and gives each a path.

Path grammar, after `<root>:` (a name of the engine's roots, or `global` for module-level state):

    .name                    attribute, parameter, buffer, child module, slot, dataclass field
    [3]  {'key'}  {#3}       item of a sequence; of a mapping by key; of a mapping by position, where the key
                             has no text that other processes share, or of a set
    .__self__  .__func__     of a bound method; .func .args .keywords of a partial
    .<closure name>  .<default 0>  .<default name>       of a function
    .<values>  .<indices>    of a sparse tensor
    .<cache>{'key'}          result of a function with an LRU cache, by its arguments
    .<referent 0>            of an object that only the garbage collector can look into, such as an iterator

Registered parameters and buffers come first, then everything else, nearest first. Module-level state is
that of every loaded module of the packages which the reached classes and functions come from. Gradients
and weak references are not followed, and what is behind raw pointers cannot be: see `collectors.trace`.
"""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from collectors.members import PLAIN, holds_nothing, holds_plain, instance_dict, members, package

GLOBAL = "global"
MAX_DEPTH = 100  # hops from a root: only a linked list is that deep
MAX_OBJECTS = 5_000_000

_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class WalkError(RuntimeError):
    """The walk would have had to leave something out."""


@dataclass(slots=True)
class Found:
    """A tensor, the path at which it was met first, and other paths to the same view of the same storage.

    origin: parameter | buffer | attribute; seen (named by the engine, met by no walk); packed (held by a kernel, read
    back through it). storage: address of its storage, 0 where there is none.
    """

    path: str
    root: str
    origin: str
    tensor: Tensor
    storage: int
    aliases: list[str] = field(default_factory=list)


def walk(
    roots: Mapping[str, nn.Module], max_depth: int = MAX_DEPTH, max_objects: int = MAX_OBJECTS
) -> list[Found]:
    """Every tensor reachable from `roots`, each (storage, offset, shape, stride, dtype) once.

    Raises WalkError when a bound is met, since what lies beyond would be missing from the audit.
    """
    walker = _Walker(max_depth, max_objects)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, module in roots.items():
            walker.module(_Place(name, f"{name}:", 0), module)
        walker.drain()
        walker.globals()
        walker.drain()
    for found in walker.found.values():
        found.aliases.sort()
    return list(walker.found.values())


def storage_address(tensor: Tensor) -> int:
    """Address of the storage of `tensor`; 0 where there is none to read (meta, wrapper, fake, released)."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # how torch answers for wrapper subclasses and fake tensors
        return 0


class _Place(NamedTuple):
    root: str
    path: str
    depth: int  # hops from the root

    def step(self, step: str) -> "_Place":
        path = self.path + (step[1:] if self.path.endswith(":") and step[0] == "." else step)
        return _Place(self.root, path, self.depth + 1)


class _Walker:
    def __init__(self, max_depth: int, max_objects: int) -> None:
        self.found: dict[tuple[object, ...], Found] = {}
        self._max_depth, self._max_objects = max_depth, max_objects
        self._paths: set[str] = set()
        self._seen: dict[int, object] = {}  # holds what was met, so that no id is given away meanwhile
        self._kinds: set[int] = (
            set()
        )  # whose packages are noted; by identity, as hashing a class may run its code
        self._modules: set[int] = set()
        self._todo: deque[tuple[_Place, object]] = deque()
        self._packages: set[str] = set()

    def module(self, place: _Place, module: nn.Module, ancestors: tuple[int, ...] = ()) -> None:
        """Parameters and buffers of a tree of modules, under every name that they are registered by."""
        state = instance_dict(module)
        self._modules.add(id(module))
        self._enqueue(place, module)
        for origin, registry in (("parameter", "_parameters"), ("buffer", "_buffers")):
            for name, tensor in sorted(state.get(registry, {}).items()):
                if tensor is not None:
                    self._tensor(place.step(f".{name}"), tensor, origin)
        ancestors = (*ancestors, id(module))
        for name, child in state.get("_modules", {}).items():
            if child is not None and id(child) not in ancestors:
                self.module(place.step(f".{name}"), child, ancestors)

    def drain(self) -> None:
        while self._todo:
            place, thing = self._todo.popleft()
            for step, child in members(thing):
                self._member(place, step, child)

    def globals(self) -> None:
        packages = frozenset(self._packages)  # of what the roots hold, not of what globals import in turn
        for name in sorted(sys.modules):
            module = sys.modules[name]
            if not issubclass(type(module), ModuleType) or name.partition(".")[0] not in packages:
                continue
            place = _Place(GLOBAL, f"{GLOBAL}:{name}", 0)
            for variable, value in sorted(instance_dict(module).items()):
                if variable.startswith("__"):
                    continue
                if issubclass(type(value), type) and package(value.__module__) in packages:
                    self._enqueue(place.step(f".{variable}"), value)
                self._member(place, f".{variable}", value)

    def _member(self, place: _Place, step: str, thing: Any) -> None:
        kind = type(thing)
        if kind in PLAIN or holds_plain(thing, kind):
            return
        if id(thing) in self._seen and not issubclass(kind, Tensor):
            return
        if kind is FunctionType and holds_nothing(thing):
            self._note_package(thing.__module__)
            return
        place = place.step(step)  # a path costs more than all that: only now
        if issubclass(kind, Tensor):
            self._tensor(place, thing, "attribute")
        elif issubclass(kind, torch.UntypedStorage):
            view = torch.empty(0, dtype=torch.uint8, device=thing.device).set_(thing)
            self._tensor(place, view, "attribute")
        elif issubclass(kind, nn.Module):
            if id(thing) not in self._modules:
                self.module(place, thing)
        elif issubclass(kind, type):
            self._note_package(thing.__module__)
        elif issubclass(kind, ModuleType):
            self._note_package(thing.__name__)
        else:
            self._enqueue(place, thing)

    def _enqueue(self, place: _Place, thing: Any) -> None:
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        kind = type(thing)
        if id(kind) not in self._kinds:
            self._kinds.add(id(kind))
            for base in kind.__mro__ if issubclass(kind, nn.Module) else (kind,):
                self._note_package(base.__module__)
        if kind is FunctionType:
            self._note_package(thing.__module__)
            if holds_nothing(thing):
                return
        if place.depth > self._max_depth or len(self._seen) > self._max_objects:
            raise WalkError(
                f"The walk met its bound of {self._max_depth} hops and {self._max_objects} objects at "
                f"{place.path!r} ({len(self._seen)} objects seen). Tensors beyond it would go unaudited: keep such a "
                "structure out of the modules' reach, or raise the bound."
            )
        self._todo.append((place, thing))

    def _note_package(self, name: object) -> None:
        top = package(name)
        if top:
            self._packages.add(top)

    def _tensor(self, place: _Place, tensor: Tensor, origin: str) -> None:
        inner = list(_inner_tensors(tensor))
        for step, part in inner:
            self._tensor(place.step(step), part, origin)
        if not inner:
            self._record(place, tensor.data if is_lazy(tensor) else tensor, origin)
        if instance_dict(tensor) or type(tensor) not in (Tensor, nn.Parameter):
            self._enqueue(place, tensor)

    def _record(self, place: _Place, tensor: Tensor, origin: str) -> None:
        address = storage_address(tensor)
        key: tuple[object, ...] = (id(tensor),)
        if address and tensor.nbytes:
            view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            key = (address, tensor.device, *view)
        if key in self.found:
            known = self.found[key]
            if place.path != known.path and place.path not in known.aliases:
                known.aliases.append(place.path)
            return
        path, copies = place.path, 1
        while path in self._paths:  # an attribute and a slot, or two keys, of the same text
            copies += 1
            path = f"{place.path}#{copies}"
        self._paths.add(path)
        self.found[key] = Found(path, place.root, origin, tensor, address)


def _inner_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold the bytes of a sparse tensor or a wrapper subclass; none for a plain one."""
    if type(tensor) is nn.Parameter or type(tensor) is Tensor:
        for name in _SPARSE_PARTS.get(tensor.layout, ()):
            yield f".<{name.lstrip('_')}>", getattr(tensor, name)()
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield f".{name}", getattr(tensor, name)
