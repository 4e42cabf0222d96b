"""Proof that a process runs the code of its arm: every module that it imported lies where the arm's code is."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from workloads.source import SOURCES


class CodeError(Exception):
    """A module came from elsewhere. The message is a full sentence."""


def require_own_code(package_dir: str) -> None:
    """Looks at all that is imported so far of this project and, where `package_dir` holds packages of the engine with
    files laid over them, of those. Raises CodeError."""
    expected = dict.fromkeys(SOURCES, str(Path(__file__).resolve().parents[1]))
    if package_dir:
        packages = (entry.name for entry in Path(package_dir).iterdir() if entry.is_dir())
        expected |= dict.fromkeys(packages, package_dir)
    wrong = _elsewhere(expected)
    if wrong:
        name, file = wrong[0]
        raise CodeError(
            f"{len(wrong)} modules of this process are not of its arm, the first of them {name}: it was imported from "
            f"{file}, not from below {expected[name.partition('.')[0]]}. Another installation comes first on the "
            "path of its interpreter, or a .pth file loads one."
        )


def _elsewhere(expected: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names and files of modules that are not below the folder of their package."""
    found = []
    for name, module in sorted(sys.modules.items()):
        folder, file = expected.get(name.partition(".")[0]), getattr(module, "__file__", None)
        # A package made of links keeps the path of the link; trees of ours may be reached through one.
        if folder is not None and file is not None:
            paths = (os.path.abspath(file), os.path.realpath(file))
            if not any(Path(path).is_relative_to(folder) for path in paths):
                found.append((name, file))
    return found
