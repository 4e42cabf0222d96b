"""The walk finds a tensor in every kind of place, names it alike in every process, and runs no code of the objects."""

import functools
import os
import subprocess
import sys
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from collectors.walk import Found, WalkError, walk

torch.set_num_threads(1)

REPOSITORY = Path(__file__).parents[2]
CACHE: dict[str, torch.Tensor] = {}
HOLDER: list[torch.Tensor] = []


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.ones(size)


class Kernel:
    workspace: torch.Tensor | None = None

    def run(self, x: int) -> int:
        return x


class Slotted:
    __slots__ = ("__private", "held", "unset")

    def __init__(self, held: torch.Tensor) -> None:
        self.held = self.__private = held


class SlottedList(list[Any]):
    __slots__ = ("extra",)


@dataclass
class Plan:
    steps: list[Any]


@dataclass(slots=True, frozen=True)
class SlottedPlan:
    scale: torch.Tensor


class Key(Enum):
    GATE = 1


Pair = namedtuple("Pair", "first second")


def found(module: nn.Module) -> dict[str, Found]:
    """By path; every path is unique."""
    tensors = walk({"target": module})
    by_path = {one.path: one for one in tensors}
    assert len(by_path) == len(tensors)
    return by_path


def path_of(tensor: torch.Tensor, module: nn.Module) -> str:
    """The path of the storage of `tensor`, which must be found exactly once."""
    (path,) = (p for p, one in found(module).items() if one.storage == tensor.untyped_storage().data_ptr())
    return path


def with_attribute(value: object) -> nn.Module:
    module = nn.Module()
    object.__setattr__(module, "x", value)
    return module


def closure(held: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: held


def default(held: torch.Tensor) -> Callable[..., object]:
    return lambda x, y=held, *, z=None: (x, y, z)


def keyword_default(held: torch.Tensor) -> Callable[..., object]:
    return lambda *, z=held: z


def function_attribute(held: torch.Tensor) -> Callable[[], None]:
    def function() -> None: ...

    function.cache = {1: held}
    return function


def kernel(held: torch.Tensor) -> Kernel:
    made = Kernel()
    made.state = {"plan": Plan([held])}
    return made


def keyed_by_object(held: torch.Tensor) -> Any:
    mapping: Any = weakref.WeakKeyDictionary()
    mapping[KEPT] = held
    return mapping


def slotted_list(held: torch.Tensor) -> SlottedList:
    made = SlottedList([1])
    made.extra = held
    return made


def cached(held: torch.Tensor, maxsize: int | None) -> Callable[..., torch.Tensor | None]:
    function = functools.lru_cache(maxsize)(lambda *_, **__: HOLDER.pop() if HOLDER else None)
    HOLDER.append(held)
    function(3, dtype=torch.float32)
    function(4, dtype=torch.float32)
    return function


def generator(held: torch.Tensor) -> Iterator[torch.Tensor]:
    def items() -> Iterator[torch.Tensor]:
        local = held
        yield local
        yield local

    running = items()
    next(running)
    return running


def tensor_attribute(held: torch.Tensor) -> torch.Tensor:
    tensor = torch.zeros(1)
    tensor.scale = held
    return tensor


def hidden_module(held: torch.Tensor) -> list[nn.Module]:
    inner = nn.Module()
    inner.register_buffer("table", held, persistent=False)
    return [nn.Sequential(inner)]


KEPT = Kernel()
PLACES: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "attribute": (lambda t: t, "x"),
    "list": (lambda t: [1, [t]], "x[1][0]"),
    "tuple": (lambda t: (t, 1), "x[0]"),
    "namedtuple": (lambda t: Pair(1, t), "x[1]"),
    "deque": (lambda t: deque([t]), "x[0]"),
    "list with slots": (slotted_list, "x.extra"),
    "dict": (lambda t: {"a": {7: t}}, "x{'a'}{7}"),
    "dict by tuple": (lambda t: {(1, "b"): t}, "x{(1, 'b')}"),
    "dict by dtype": (lambda t: {torch.bfloat16: t}, "x{torch.bfloat16}"),
    "dict by enum": (lambda t: {Key.GATE: t}, "x{Key.GATE}"),
    "dict by class": (lambda t: {Kernel: t}, f"x{{{__name__}.Kernel}}"),
    "dict by address": (lambda t: {1: 0, 1 << 47: t}, "x{#1}"),
    "dict by object": (lambda t: {KEPT: t}, "x{#0}"),
    "dict key": (lambda t: {t: 1}, "x{#0}.<key>"),
    "ordered dict": (lambda t: OrderedDict(a=t), "x{'a'}"),
    "default dict": (lambda t: defaultdict(list, a=t), "x{'a'}"),
    "user dict": (lambda t: UserDict(a=t), "x.data{'a'}"),
    "weak-key dict": (keyed_by_object, "x.data{#0}"),
    "mapping proxy": (lambda t: types.MappingProxyType({"a": t}), "x.<referent 0>{'a'}"),
    "set": (lambda t: {t}, "x{#0}"),
    "frozen set": (lambda t: frozenset([1, t]), "x{#0}"),
    "namespace": (lambda t: types.SimpleNamespace(a=t), "x.a"),
    "dataclass": (lambda t: Plan([t]), "x.steps[0]"),
    "dataclass with slots": (SlottedPlan, "x.scale"),
    "slot": (lambda t: Slotted(t), "x._Slotted__private"),
    "kernel object": (kernel, "x.state{'plan'}.steps[0]"),
    "partial argument": (lambda t: functools.partial(print, t), "x.args[0]"),
    "partial keyword": (lambda t: functools.partial(print, end=t), "x.keywords{'end'}"),
    "partial of closure": (lambda t: functools.partial(closure(t), 1), "x.func.<closure held>"),
    "bound method": (lambda t: kernel(t).run, "x.__self__.state{'plan'}.steps[0]"),
    "bound built-in method": (lambda t: [t].append, "x.__self__[0]"),
    "closure": (closure, "x.<closure held>"),
    "default": (default, "x.<default 0>"),
    "keyword default": (keyword_default, "x.<default z>"),
    "function attribute": (function_attribute, "x.cache{1}"),
    "bounded LRU cache": (lambda t: cached(t, 8), "x.<cache>{(3, object(), 'dtype', torch.float32)}"),
    "unbounded cache": (lambda t: cached(t, None), "x.<cache>{(3, object(), 'dtype', torch.float32)}"),
    "generator": (generator, "x.<local local>"),
    "iterator": (lambda t: repeat(t), "x.<referent 0>"),
    "tensor's attribute": (tensor_attribute, "x.scale"),
    "hidden module": (hidden_module, "x[0].0.table"),
    "bare storage": (lambda t: t.untyped_storage(), "x"),
    "wrapper subclass": (lambda t: TwoTensor(t, torch.zeros(t.shape)), "x.a"),
    "view": (lambda t: t[1:], "x"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_is_found_wherever_it_hides(place: str) -> None:
    hide, path = PLACES[place]
    held = torch.arange(3.0)
    module = with_attribute(hide(held))
    (one,) = (one for one in found(module).values() if one.storage == held.untyped_storage().data_ptr())
    assert f"target:{path}" in (one.path, *one.aliases)
    assert one.root == "target"


def test_registered_tensors_and_their_origins() -> None:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.ones(1)))
    module.register_parameter("gone", None)
    module.register_buffer("b", torch.ones(2))
    module.register_buffer("n", torch.ones(3), persistent=False)
    module.child = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    module.plain = torch.ones(4)
    assert {path: one.origin for path, one in found(module).items()} == {
        "target:b": "buffer",
        "target:child.0.weight": "parameter",
        "target:n": "buffer",
        "target:plain": "attribute",
        "target:w": "parameter",
    }


def test_module_globals_classes_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, result, entry = torch.ones(5), table(7), torch.ones(6)
    monkeypatch.setattr(Kernel, "workspace", workspace)
    monkeypatch.setitem(CACHE, "key", entry)
    module = with_attribute(Kernel())
    assert path_of(workspace, module) == f"global:{__name__}.Kernel.workspace"
    assert path_of(entry, module) == f"global:{__name__}.CACHE{{'key'}}"
    assert path_of(result, module) == f"global:{__name__}.table.<cache>{{7}}"
    assert found(module)[f"global:{__name__}.CACHE{{'key'}}"].root == "global"
    assert not any(path.startswith("global:") for path in found(with_attribute(1)))
    table.cache_clear()


def test_module_and_functions_lead_to_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package, inner = types.ModuleType("kernels_pkg"), types.ModuleType("kernels_pkg.moe")
    inner.WORKSPACE = held = torch.ones(3)
    monkeypatch.setitem(sys.modules, "kernels_pkg", package)
    monkeypatch.setitem(sys.modules, "kernels_pkg.moe", inner)
    assert path_of(held, with_attribute(package)) == "global:kernels_pkg.moe.WORKSPACE"
    function = types.FunctionType((lambda: None).__code__, {"__name__": "kernels_pkg.other"})
    assert path_of(held, with_attribute(function)) == "global:kernels_pkg.moe.WORKSPACE"


def test_packages_that_globals_import_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's globals lead everywhere: web servers, tokenizers, other engines."""
    elsewhere = types.ModuleType("zz_elsewhere")
    elsewhere.STATE = torch.ones(3)
    monkeypatch.setitem(sys.modules, "zz_elsewhere", elsewhere)
    monkeypatch.setattr(sys.modules[__name__], "ELSEWHERE", elsewhere, raising=False)
    assert list(found(with_attribute(Kernel()))) == []


# Aliases -------------------------------------------------------------------------------------------


def test_every_name_of_a_view_is_recorded_once() -> None:
    embed, draft = nn.Embedding(4, 2), nn.Module()
    model = nn.Module()
    model.embed = embed
    model.head = nn.Linear(2, 4, bias=False)
    model.head.weight = embed.weight
    model.extra = {"tied": embed.weight}
    draft.embed = embed
    draft.flat = embed.weight.detach().view(-1)
    tensors = walk({"target": model, "draft": draft})
    assert [(one.path, one.root, one.aliases) for one in tensors] == [
        (
            "target:embed.weight",
            "target",
            ["draft:embed.weight", "target:extra{'tied'}", "target:head.weight"],
        ),
        ("draft:flat", "draft", []),
    ]
    assert tensors[0].storage == tensors[1].storage != 0


def test_an_alias_met_twice_is_listed_once() -> None:
    held, other = torch.ones(2), torch.zeros(2)
    tensors = found(with_attribute([TwoTensor(held, other), TwoTensor(held, other.clone())]))
    assert tensors["target:x[0].a"].aliases == ["target:x[1].a"]


def test_paths_stay_unique_where_names_collide() -> None:
    module = with_attribute(types.SimpleNamespace(y=torch.ones(1)))
    object.__setattr__(module, "x.y", torch.ones(2))
    assert {path: len(one.tensor) for path, one in found(module).items()} == {
        "target:x.y": 2,
        "target:x.y#2": 1,
    }


def test_equal_views_of_other_dtype_offset_or_stride_are_tensors_of_their_own() -> None:
    base = torch.zeros(4, 4, dtype=torch.int32)
    views = [base, base.view(torch.float32), base.t(), base[1:], base[:3], base.view(16), base.view(4, 4)]
    tensors = found(with_attribute(views))
    assert len(tensors) == 6
    assert tensors["target:x[0]"].aliases == ["target:x[6]"]


def test_tensors_without_bytes_are_no_aliases() -> None:
    empties = [torch.empty(0), torch.empty(0), torch.empty(0, device="meta"), nn.UninitializedParameter()]
    tensors = found(with_attribute(empties))
    assert {path: one.aliases for path, one in tensors.items()} == {f"target:x[{i}]": [] for i in range(4)}


def test_sparse_tensors_are_their_parts() -> None:
    coo, csr = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    assert list(found(with_attribute([coo, csr]))) == [
        *("target:x[0].<indices>", "target:x[0].<values>"),
        *("target:x[1].<crow_indices>", "target:x[1].<col_indices>", "target:x[1].<values>"),
    ]


def test_a_wrapped_parameter_keeps_its_origin() -> None:
    module = nn.Module()
    module.w = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)))
    assert {path: one.origin for path, one in found(module).items()} == {
        "target:w.a": "parameter",
        "target:w.b": "parameter",
    }


def test_gradients_are_not_followed() -> None:
    module = nn.Linear(2, 2, bias=False)
    module(torch.ones(1, 2)).sum().backward()
    assert list(found(module)) == ["target:weight"]


# Determinism ---------------------------------------------------------------------------------------


def test_paths_do_not_depend_on_the_order_of_assignment() -> None:
    """A reload deletes attributes and sets them again: the same objects must keep their names."""
    first, second, shared = nn.Module(), nn.Module(), {"t": torch.ones(2)}
    first.a, first.b, first.w = shared, shared, nn.Parameter(torch.ones(3))
    second.w, second.b, second.a = nn.Parameter(torch.ones(3)), shared, shared
    assert list(found(first)) == list(found(second)) == ["target:w", "target:a{'t'}"]
    second.v = second.w  # a tied parameter registered last, of a name that comes first
    assert list(found(second)) == ["target:v", "target:a{'t'}"]


def test_caches_are_named_by_arguments_not_by_recency() -> None:
    function = functools.lru_cache(lambda size: torch.ones(size))
    function(1), function(2)
    before = list(found(with_attribute(function)))
    function(1)
    assert list(found(with_attribute(function))) == before == ["target:x.<cache>{1}", "target:x.<cache>{2}"]


def test_sets_are_named_by_content() -> None:
    values = [torch.full((3,), float(i)) for i in range(6)]
    want = [float(one.tensor[0]) for one in found(with_attribute(set(values))).values()]
    for _ in range(5):
        copies = {value.clone() for value in values}
        assert [float(one.tensor[0]) for one in found(with_attribute(copies)).values()] == want


def paths_of_all_places() -> str:
    module = nn.Module()
    for name, (hide, _) in PLACES.items():
        object.__setattr__(module, name.replace(" ", "_"), hide(torch.ones(3)))
    return "\n".join(found(module))


def test_another_process_gives_the_same_paths() -> None:
    script = "import test_walk; print(test_walk.paths_of_all_places())"
    path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == paths_of_all_places()
    assert done.stdout.count("\n") >= len(PLACES)


# Side effects and bounds ---------------------------------------------------------------------------


class Untouchable:
    """Every access that Python lets a class intercept fails the test."""

    def __init__(self, held: torch.Tensor) -> None:
        object.__setattr__(self, "held", held)

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("the walk ran code of an object")

    __getattribute__ = __iter__ = __len__ = __eq__ = __repr__ = __bool__ = _refuse
    __getattr__ = __call__ = __contains__ = __getitem__ = _refuse
    __hash__ = object.__hash__
    __class__ = property(_refuse)
    __dict__ = property(_refuse)
    lazy = property(_refuse)


class UntouchableDict(dict[str, Any]):
    __iter__ = items = keys = values = __getitem__ = Untouchable._refuse


class UntouchableList(list[Any]):
    __iter__ = __getitem__ = __len__ = Untouchable._refuse


def test_no_code_of_the_objects_runs() -> None:
    held = [torch.ones(i) for i in (1, 2, 3, 4)]
    module = with_attribute([Untouchable(held[0]), UntouchableDict(a=held[1]), UntouchableList([held[2]])])

    class Sealed(nn.Module):
        expensive = property(Untouchable._refuse)

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    sealed = Sealed()
    sealed.__dict__["table"] = held[3]
    module.add_module("sealed", sealed)
    sealed_path, *paths = found(module)
    assert sealed_path == "target:sealed.table"
    # Where the class hides the very `__dict__`, only the garbage collector still tells what is held.
    assert paths == ["target:x[0].<referent 0>", "target:x[1]{'a'}", "target:x[2][0]"]


def test_cycles_end() -> None:
    module, child = nn.Module(), nn.Module()
    child.weight = nn.Parameter(torch.ones(2))
    child.parent = module  # registered: a cycle of modules
    module.child, module.again = child, [module]
    module.loop = loop = {}
    loop["self"] = [loop, child]
    assert list(found(module)) == ["target:child.weight"]


class Node:
    def __init__(self, next_: object) -> None:
        self.next = next_


def test_bounds_are_errors_that_name_the_path() -> None:
    chain: object = torch.ones(1)
    for _ in range(90):
        chain = Node(chain)
    module = with_attribute(chain)
    assert len(found(module)) == 1
    with pytest.raises(WalkError, match=r"bound of 20 hops .* at 'target:x(\.next){20}'"):
        walk({"target": module}, max_depth=20)
    with pytest.raises(WalkError, match="Tensors beyond it would go unaudited"):
        walk({"target": module}, max_objects=50)
