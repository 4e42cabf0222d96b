"""Every tensor that the modules of some models hold, wherever an attribute keeps it, and how to put it back.

Kept are parameters, buffers, plain attributes, and tuples, lists and dicts of them; and plain values (flags, numbers,
text), since post-processing may have set them. What a kernel object or a closure keeps is not seen: the audit of the
restored engine shows it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from workloads.loading.shards import CheckpointError
from workloads.loading.weights import ModelRoot, WeightModule

_INTERNAL = frozenset(vars(nn.Module()))
_SKIPPED = {"weights", "padding_regions", "padding_filled", "derived"}
_PLAIN = (bool, int, float, str, type(None))


class NotSavableError(Exception):
    """A tensor that cannot be named in a file."""


@dataclass
class Snapshot:
    """tensors: contiguous, by key. places: root -> module path -> what it holds, plain data: `parameters`, `buffers`
    and `attributes` by name (a tensor is {"tensor": key, "stride": [...]}), `values`, `derived`, `consumed`."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


def take(roots: Mapping[str, ModelRoot]) -> Snapshot:
    """Tensors that are one and the same in several places are kept once. Raises NotSavableError for a tensor in a
    container that a file cannot name."""
    snapshot, known = Snapshot(), dict[Any, str]()
    for root, model in roots.items():
        modules = {path: _Taker(snapshot, known, f"{root}:{path}") for path, _ in model.named_modules()}
        snapshot.places[root] = {path: modules[path].module(module) for path, module in model.named_modules()}
    return snapshot


def adopt(snapshot: Snapshot, root: str, model: ModelRoot) -> Iterator[tuple[str, int]]:
    """Put the tensors of one model in place; yields (path of module, bytes of its tensors) module by module.

    Raises CheckpointError when the model has other modules or parameters than the snapshot.
    """
    places, modules = snapshot.places.get(root, {}), dict(model.named_modules())
    if places.keys() != modules.keys():
        odd = min(places.keys() ^ modules.keys())
        raise CheckpointError(
            f"The saved state and {root} differ in the module {odd!r}: save it with the same code and dimensions."
        )
    giver = _Giver(snapshot.tensors)
    for path, module in modules.items():
        before = giver.nbytes
        giver.module(f"{root}:{path}", module, places[path])
        yield path, giver.nbytes - before


class _Taker:
    def __init__(self, snapshot: Snapshot, known: dict[Any, str], path: str) -> None:
        self._snapshot, self._known, self._path = snapshot, known, path

    def module(self, module: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {
            "parameters": self._held(module._parameters),
            "buffers": self._held(module._buffers),
            "attributes": {},
            "values": {},
        }
        for name, value in vars(module).items():
            if name in _SKIPPED or name in _INTERNAL:
                continue
            if isinstance(value, _PLAIN):
                found["values"][name] = value
            elif (described := self._described(name, value)) is not None:
                found["attributes"][name] = described
        if isinstance(module, WeightModule):
            found["derived"] = sorted(module.derived)
            found["consumed"] = [name for name in module.weights if module.live(name) is None]
        return found

    def _held(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        return {name: self._tensor(name, tensor) for name, tensor in tensors.items() if tensor is not None}

    def _described(self, name: str, value: Any) -> dict[str, Any] | None:
        """Plain data for an attribute with tensors in it, None for any other."""
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if not isinstance(value, tuple | list | dict) or not _has_tensor(value):
            return None
        if type(value) not in (tuple, list, dict):
            raise NotSavableError(
                f"{self._path}.{name} is a {type(value).__name__} with tensors in it, which a tensorizer file cannot "
                "name: keep tensors in tuples, lists or dicts, or choose another load path."
            )
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [[key, self._described(f"{name}[{key}]", item)] for key, item in items]
        plain = [[key, item] for key, item in items if isinstance(item, _PLAIN)]
        return {type(value).__name__: [pair for pair in inner if pair[1] is not None], "plain": plain}

    def _tensor(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if where not in self._known:
            self._known[where] = f"{self._path}.{name}"
            self._snapshot.tensors[self._known[where]] = tensor.detach().contiguous()
        return {"tensor": self._known[where], "stride": list(tensor.stride())}


class _Giver:
    """Puts tensors back; one that several places share is made once."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.nbytes = 0
        self._tensors = tensors
        self._made: dict[str, torch.Tensor] = {}

    def module(self, path: str, module: nn.Module, held: Mapping[str, Any]) -> None:
        if isinstance(module, WeightModule):
            for name in held["consumed"]:
                module.consume(name)
            module.derived = set(held["derived"])
        for name, place in held["parameters"].items():
            self._parameter(path, module, name, place)
        for name, place in held["buffers"].items():
            module._buffers[name] = self._value(place)
        for name, place in held["attributes"].items():
            setattr(module, name, self._value(place))
        for name, value in held["values"].items():
            setattr(module, name, value)

    def _parameter(self, path: str, module: nn.Module, name: str, place: Mapping[str, Any]) -> None:
        fresh, saved = module._parameters.get(name), self._tensors[place["tensor"]]
        if fresh is None or fresh.shape != saved.shape or fresh.dtype is not saved.dtype:
            there = "none" if fresh is None else f"{fresh.dtype} {tuple(fresh.shape)}"
            raise CheckpointError(
                f"The saved state has {path}.{name} as {saved.dtype} {tuple(saved.shape)}, this model {there}: save "
                "it with the same code and dimensions."
            )
        if place["tensor"] in self._made:
            module._parameters[name] = nn.Parameter(self._made[place["tensor"]], requires_grad=False)
            return
        fresh.copy_(saved)
        self.nbytes += saved.nbytes
        self._made[place["tensor"]] = fresh.detach()

    def _value(self, place: Mapping[str, Any]) -> Any:
        if "tensor" in place:
            return self._tensor(place)
        [kind] = place.keys() - {"plain"}
        items = [(key, self._value(inner)) for key, inner in place[kind]]
        items += [(key, value) for key, value in place["plain"]]
        if kind == "dict":
            return dict(items)
        in_order = [value for _, value in sorted(items, key=lambda item: int(item[0]))]
        return tuple(in_order) if kind == "tuple" else in_order

    def _tensor(self, place: Mapping[str, Any]) -> torch.Tensor:
        key = place["tensor"]
        if key not in self._made:
            saved = self._tensors[key]
            made = torch.empty_strided(saved.shape, place["stride"], dtype=saved.dtype)
            self._made[key] = made.copy_(saved)
            self.nbytes += saved.nbytes
        return self._made[key]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, torch.Tensor) or (
        isinstance(value, tuple | list) and any(map(_has_tensor, value))
    )
