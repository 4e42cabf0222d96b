"""Known failures, one small module each: `ABOUT`, and a class that overrides one step of the loader or the engine.

A class is mixed into the real one, so that what is proved to be caught is what really runs. Imports no torch, and
neither do the modules before their classes are used: the control side lists them.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from workloads.faults._about import RELOADS, About

__all__ = ["RELOADS", "about", "engine_class", "loader_class", "names", "sentence"]

if TYPE_CHECKING:
    from workloads.engines.native import NativeEngine
    from workloads.loading.loader import Loader

    LoaderFault = Loader
    EngineFault = NativeEngine
else:
    LoaderFault = EngineFault = object


def names() -> list[str]:
    """Every fault that `code.candidate.faults` accepts."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def about(name: str) -> About:
    """What a fault says of itself. Raises ValueError for an unknown name."""
    told: About = _module(name).ABOUT
    return told


def sentence(name: str) -> str:
    """What goes wrong, in one sentence."""
    return (_module(name).__doc__ or "").partition("\n")[0]


def loader_class(faults: Sequence[str]) -> "type[Loader]":
    """The loader with the given faults in it, the first one outermost; without any, the loader itself.

    Raises ValueError for an unknown name.
    """
    bases = [module.Fault for name in faults if hasattr(module := _module(name), "Fault")]
    from workloads.loading.loader import Loader  # torch comes with it

    return type("FaultyLoader", (*bases, Loader), {}) if bases else Loader


def engine_class(faults: Sequence[str]) -> "type[NativeEngine]":
    """The engine with those of the given faults in it that are not the loader's."""
    bases = [module.InEngine for name in faults if hasattr(module := _module(name), "InEngine")]
    from workloads.engines.native import NativeEngine

    return type("FaultyEngine", (*bases, NativeEngine), {}) if bases else NativeEngine


def _module(name: str) -> ModuleType:
    if name not in names():
        raise ValueError(f"Unknown fault {name!r}; known are {', '.join(names())}.")
    return importlib.import_module(f"{__name__}.{name}")
