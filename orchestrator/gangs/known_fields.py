"""A specification in the words of the code that reads it, which may be of a commit from before a field was added."""

import ast
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.failure import AttemptError


def told(value: Any, tree: Path) -> Any:
    """As `asdict`, without fields that the code below `tree` does not know and that are as by default. Raises
    AttemptError for an unknown field with another value: that code cannot do what is asked."""
    if is_dataclass(value) and not isinstance(value, type):
        known = _known(type(value), tree)
        return {
            one.name: told(getattr(value, one.name), tree)
            for one in fields(value)
            if one.name in known or not _is_default(one, value, tree)
        }
    if isinstance(value, Mapping):
        return {key: told(item, tree) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [told(item, tree) for item in value]
    return value


def _is_default(one: "Field[Any]", owner: Any, tree: Path) -> bool:
    value = getattr(owner, one.name)
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    if value != default:
        raise AttemptError(
            "code",
            f"{type(owner).__name__}.{one.name} is {value!r}, and the code below {tree} is of a version without that "
            "setting: leave it out, or choose a later commit.",
        )
    return True


@cache
def _known(kind: type, tree: Path) -> frozenset[str]:
    """Names of the fields of a dataclass in that code; all of ours where it keeps the class elsewhere."""
    found: set[str] = set()
    for base in kind.__mro__:
        if is_dataclass(base):
            file = tree / f"{base.__module__.replace('.', '/')}.py"
            named = _classes(file).get(base.__name__) if file.is_file() else None
            if named is None:
                return frozenset(one.name for one in fields(kind))
            found |= named
    return frozenset(found)


@cache
def _classes(file: Path) -> dict[str, set[str]]:
    """Names that each class of a file annotates."""
    return {
        node.name: {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
