"""Known failures, one small module each: a `Fault` class that overrides one step of the loader.

Imports no torch: the control side lists the names.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.loading.loader import Loader

RELOADS = ("layerwise", "direct")


def names() -> list[str]:
    """Every fault that `code.candidate.faults` accepts."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def loader_class(faults: Sequence[str]) -> "type[Loader]":
    """The loader with the given faults in it, the first one outermost; without any, the loader itself.

    Raises ValueError for an unknown name.
    """
    unknown = [fault for fault in faults if fault not in names()]
    if unknown:
        raise ValueError(f"Unknown fault {unknown[0]!r}; known are {', '.join(names())}.")
    bases = [importlib.import_module(f"workloads.faults.{fault}").Fault for fault in faults]
    from workloads.loading.loader import Loader  # torch comes with it

    return type("FaultyLoader", (*bases, Loader), {}) if bases else Loader
