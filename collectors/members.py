"""What a Python object holds directly, as (step, child) pairs, without running any of its code.

Instance dictionaries, slots and the items of containers are read through the descriptors of the built-in
types themselves, so properties, `__getattr__` and overridden iterators stay untouched. Attributes come by
name and mapping items by key: the order does not depend on the history of assignments.
"""

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from collectors.fingerprint import fingerprint, why_unreadable

Member = tuple[str, object]
T = TypeVar("T")

#: Values that hold no tensors. Membership is by exact type: it is asked for every value met.
PLAIN = frozenset(
    {
        *(int, float, complex, bool, str, bytes, bytearray, type(None), type(...), type(NotImplemented)),
        *(range, slice, memoryview, weakref.ref, weakref.ProxyType, weakref.CallableProxyType, np.ndarray),
        *(types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType),
        *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
    }
)
#: Packages whose objects are not looked into: machinery that holds no model state, and much of everything else.
_OPAQUE = (
    *(
        "_frozen_importlib",
        "ast",
        "asyncio",
        "ctypes",
        "importlib",
        "inspect",
        "logging",
        "numpy",
        "re",
        "typing",
    ),
    *(
        f"torch.{part}"
        for part in ("_C", "_dynamo", "_inductor", "_library", "_ops", "_subclasses", "fx", "library")
    ),
    "triton",
)
#: Packages whose globals are not walked when objects of theirs are met.
_FOREIGN = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "triton", "safetensors", "pytest", "_pytest", "pluggy", "collectors",
}  # fmt: skip
_CONTAINERS = frozenset({tuple, list, set, frozenset})
_LRU_CACHE = type(lru_cache(lambda: None))
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_LARGEST_STABLE_KEY = 1 << 32  # larger integers are ids and addresses, different in every process


def _per_type(compute: Callable[[type], T]) -> Callable[[type], T]:
    """Remembers `compute` by identity: hashing a class may run code of its metaclass."""
    known: dict[int, tuple[type, T]] = {}

    def cached(kind: type) -> T:
        if id(kind) not in known:
            known[id(kind)] = (kind, compute(kind))  # the class is kept, and with it its id
        return known[id(kind)][1]

    return cached


def members(thing: Any) -> Iterator[Member]:
    """Direct members of `thing`; a module's registered parameters, buffers and children are left out."""
    kind = type(thing)  # never isinstance: it asks the object for its __class__
    if kind is types.FunctionType:
        yield from _function(thing)
    elif kind is types.GeneratorType:
        state = dict(thing.gi_frame.f_locals) if thing.gi_frame else {}
        yield from ((f".<local {step[1:]}>", value) for step, value in _attributes(state))
    elif kind is types.BuiltinFunctionType:
        yield ".__self__", thing.__self__
    elif issubclass(kind, type):
        yield from _class(thing)
    elif not is_opaque(kind):
        yield from _items(thing, kind)
        state = instance_dict(thing)
        if issubclass(kind, nn.Module):
            state = {name: value for name, value in state.items() if name not in _REGISTRIES}
        yield from _attributes(state)
        yield from _slots(thing, kind)
        if kind is _LRU_CACHE:
            yield from ((f".<cache>{step}", value) for step, value in _mapping(_cached_results(thing)))
        elif _is_sealed(kind):
            held = [r for r in gc.get_referents(thing) if not issubclass(type(r), type | types.ModuleType)]
            yield from ((f".<referent {i}>", value) for i, value in enumerate(held))


def instance_dict(thing: object) -> dict[str, Any]:
    """The `__dict__` of an instance, past anything that a class may have put in its place; {} without one."""
    descriptor = _dict_descriptor(type(thing))
    found = descriptor(thing) if descriptor else None
    return found if type(found) is dict else {}


def package(name: object) -> str | None:
    """Top-level package of a module name, if its globals are to be walked."""
    top = name.partition(".")[0] if isinstance(name, str) else ""
    return top if top and top not in _FOREIGN else None


@_per_type
def is_opaque(kind: type) -> bool:
    if issubclass(kind, Tensor | nn.Module):
        return False
    name = kind.__module__
    return isinstance(name, str) and any(name == p or name.startswith(p + ".") for p in _OPAQUE)


def holds_nothing(function: types.FunctionType) -> bool:
    """Whether a function has neither closure, defaults nor attributes: true of nearly all."""
    return not (
        function.__closure__ or function.__defaults__ or function.__kwdefaults__ or instance_dict(function)
    )


def holds_plain(thing: Any, kind: type) -> bool:
    """Whether a container of a built-in type holds values without tensors only: true of most that a library's tables
    consist of, and told much faster than by looking at its members one by one."""
    if kind is dict:
        return PLAIN.issuperset(map(type, list(thing.values()))) and PLAIN.issuperset(map(type, list(thing)))
    return kind in _CONTAINERS and PLAIN.issuperset(map(type, list(thing)))


def _attributes(state: dict[str, Any]) -> Iterator[Member]:
    held = [(str(name), value) for name, value in list(state.items()) if type(value) not in PLAIN]
    yield from ((f".{name}", value) for name, value in sorted(held, key=lambda pair: pair[0]))


def _slots(thing: object, kind: type) -> Iterator[Member]:
    for name, read in _slot_descriptors(kind):
        try:
            yield f".{name}", read(thing)
        except AttributeError:  # declared and not set
            continue


def _function(function: types.FunctionType) -> Iterator[Member]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".<closure {name}>", cell.cell_contents
        except ValueError:  # assigned later, or deleted
            continue
    yield from ((f".<default {i}>", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from ((f".<default {name}>", value) for name, value in (function.__kwdefaults__ or {}).items())
    yield from _attributes(instance_dict(function))


def _class(kind: Any) -> Iterator[Member]:
    for name, value in _attributes(dict(type.__dict__["__dict__"].__get__(kind))):
        if not name.startswith(".__") or type(value) is types.FunctionType:
            yield name, value


def _items(thing: Any, kind: type) -> Iterator[Member]:
    if issubclass(kind, dict):
        yield from _mapping(list(dict.items(thing)))
    elif issubclass(kind, list | tuple | deque):
        base = next(base for base in (list, tuple, deque) if issubclass(kind, base))
        held = list(base.__iter__(thing))
        yield from ((f"[{i}]", value) for i, value in enumerate(held) if type(value) not in PLAIN)
    elif issubclass(kind, set | frozenset):
        unordered = set.__iter__(thing) if issubclass(kind, set) else frozenset.__iter__(thing)
        held = [value for value in unordered if type(value) not in PLAIN]
        yield from ((f"{{#{i}}}", value) for i, value in enumerate(sorted(held, key=_rank_in_set)))


def _mapping(items: list[tuple[object, object]]) -> Iterator[Member]:
    named: list[Member] = []
    for i, (key, value) in enumerate(items):
        text = _key_text(key)
        if text is None:
            named += [(f"{{#{i}}}.<key>", key), (f"{{#{i}}}", value)]
        elif type(value) not in PLAIN:
            named.append((f"{{{text}}}", value))
    yield from sorted(named, key=lambda pair: pair[0])


def _key_text(key: Any) -> str | None:
    """A text for `key` that is the same in every process, or None."""
    kind = type(key)
    if kind is int:
        return repr(key) if abs(key) < _LARGEST_STABLE_KEY else None
    if kind in (str, bool, float, bytes, type(None), torch.dtype, torch.device, torch.Size):
        return repr(key)
    if kind is object:  # a mere mark, such as the one between arguments and keywords of a cached call
        return "object()"
    if issubclass(kind, Enum):
        return f"{kind.__name__}.{instance_dict(key).get('_name_')}"
    if issubclass(kind, type):
        return f"{key.__module__}.{key.__qualname__}"
    if kind is tuple:
        texts = [_key_text(part) for part in key]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return None


def _rank_in_set(value: Any) -> tuple[str, str, str]:
    """Sets have no order that two processes share: tensors go by dtype and shape, then by content."""
    kind = type(value)
    if issubclass(kind, Tensor):
        content = "" if why_unreadable(value) else fingerprint(value)
        return ("", f"{value.dtype} {tuple(value.shape)}", content)
    return (kind.__module__, kind.__qualname__, _key_text(value) or "")


@_per_type
def _dict_descriptor(kind: type) -> Callable[[object], Any] | None:
    for base in kind.__mro__:
        found: Any = base.__dict__.get("__dict__")
        if type(found) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            read: Callable[[object], Any] = found.__get__
            return read
    return None


@_per_type
def _slot_descriptors(kind: type) -> tuple[tuple[str, Callable[[object], Any]], ...]:
    """Slots of Python classes, and the members that C types such as `partial` and bound methods expose."""
    found = {
        name: value.__get__
        for base in reversed(kind.__mro__)
        for name, value in base.__dict__.items()
        if type(value) is types.MemberDescriptorType and name != "__dict__"
    }
    return tuple(sorted(found.items()))


@_per_type
def _is_sealed(kind: type) -> bool:
    """Whether only the garbage collector knows what instances of `kind` hold, as for iterators."""
    known = (dict, list, tuple, deque, set, frozenset, Tensor, weakref.ref, types.CellType)
    if issubclass(kind, known):
        return False
    return not (_dict_descriptor(kind) or _slot_descriptors(kind))


def _cached_results(wrapper: object) -> list[tuple[object, object]]:
    """(arguments, result) of a `functools.lru_cache`, whose entries only the garbage collector tells.

    Its referents are the class, then key, result and link class of every entry if the cache is bounded, then
    the dictionary, which maps keys to results if it is not, and last the link class once more.
    """
    held = gc.get_referents(wrapper)
    links = [i for i, one in enumerate(held) if type(one) is type and one.__name__ == "_lru_list_elem"][:-1]
    return [(held[i - 2], held[i - 1]) for i in links] if links else list(held[1].items())
