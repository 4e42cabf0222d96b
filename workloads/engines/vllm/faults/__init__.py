"""Known harm done to the models of one vLLM worker after the last update, to prove that the audit sees it.

Each module has `inject(roots) -> str`: it harms one thing and returns its audit path. Nothing of vLLM is patched.
"""

from collections.abc import Mapping
from importlib import import_module

from torch import nn


def inject(name: str, roots: Mapping[str, nn.Module]) -> str:
    """Does harm `name`, a module of this folder. Raises LookupError when the models have nothing to do it to."""
    path: str = import_module(f"{__name__}.{name}").inject(roots)
    return path
