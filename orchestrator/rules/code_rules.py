"""Rules of the code that a cell's arms run: their trees, faults, and files laid over them.

Each of these files says by SHA-256 which one it was made from, so that none hides a newer one.
"""

import hashlib
import sys
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator import engine_env, provenance
from orchestrator.config import text
from orchestrator.config.freeze import arm_environment, cell_arms
from orchestrator.config.schema import Arm, Overlaid, Root
from orchestrator.rules.rule_parts import Problems
from workloads.source import SOURCES, is_source

PACKAGES = {"vllm": "vllm"}  # what an overlay may reach of a foreign engine, by backend.engine


def problems(root: Root) -> Problems:
    for name, arm in cell_arms(root).items():
        key = f"code.{name}"
        problem = text.word_problem(f"{key}.commit", arm.commit)
        if problem:
            yield problem
        tree = provenance.tree(arm.path)
        if not all((tree / folder).is_dir() for folder in SOURCES):
            yield f"{key}.path is {arm.path}, which holds no {' and '.join(SOURCES)}: name a source tree."
            continue
        known = _faults(tree, root.backend.engine)
        for fault in arm.faults:
            if fault not in known:
                yield f"{key}.faults names {fault!r}, which is not a fault; the faults are: {', '.join(known)}."
        yield from _overlay(root, name, arm)


@cache
def _faults(tree: Path, engine: str) -> list[str]:
    """Each engine has its own: in the native one they replace steps of a load, in vLLM they do harm after it."""
    folder = "workloads/engines/vllm/faults" if engine == "vllm" else "workloads/faults"
    modules = (tree / folder).glob("[!_]*.py")
    return sorted(module.stem for module in modules)


def _overlay(root: Root, name: str, arm: Arm) -> Problems:
    key, package = f"code.{name}.overlay", PACKAGES.get(root.backend.engine)
    for twice in sorted({one.at for one in arm.overlay if [o.at for o in arm.overlay].count(one.at) > 1}):
        yield f"{key} puts two files at {twice}: leave one."
    for number, one in enumerate(arm.overlay):
        place = f"{key}[{number}]"
        found = list(_plain(place, one, package))
        yield from found
        if not found and is_source(one.at):
            yield from _gate(place, one, _own_file(arm, one.at), "the arm's tree")
        elif not found:
            yield from _foreign(place, one, root, arm_environment(root, arm))


def _plain(key: str, one: Overlaid, package: str | None) -> Problems:
    allowed = [*SOURCES, *filter(None, [package])]
    parts = PurePosixPath(one.at).parts
    if len(parts) < 2 or parts[0] not in allowed or ".." in parts or one.at != "/".join(parts):
        yield f"{key}.at is {one.at!r}: name a file below {', '.join(f'{folder}/' for folder in allowed)}."
    if not Path(one.file).expanduser().is_file():
        yield f"{key}.file is {one.file!r}, which is no file on this machine: give the path of what is laid over."
    if one.replaces is not None and not _is_digest(one.replaces):
        yield (
            f"{key}.replaces is {one.replaces!r}: give the SHA-256 of the file that yours was made from, 64 "
            "hexadecimal digits (`sha256sum`), in quotes; or null for a new file."
        )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _own_file(arm: Arm, at: str) -> bytes | None:
    tree = provenance.tree(arm.path)
    commit = None if arm.commit is None else provenance.resolve_commit(tree, arm.commit)
    return provenance.tree_files(tree, commit).get(at)


def _foreign(key: str, one: Overlaid, root: Root, environment: str | None) -> Problems:
    if root.cluster.image is not None or root.backend.url is not None:
        where = "cluster.image" if root.cluster.image is not None else "backend.url"
        yield f"{key}.at is {one.at}, but {where} has the engine where nothing can be laid over it: leave it out."
        return
    try:
        python = (
            engine_env.environment_python(environment)
            if environment
            else Path(root.backend.python or sys.executable)
        )
        folder = engine_env.package_folder(str(python), one.at.partition("/")[0])
    except engine_env.EngineEnvironmentError:
        return  # that the engine is not there is said once, elsewhere
    file = folder.parent / one.at
    yield from _gate(key, one, file.read_bytes() if file.is_file() else None, str(folder))


def _gate(key: str, one: Overlaid, base: bytes | None, where: str) -> Problems:
    if base is None and one.replaces is not None:
        yield f"{key}.at is {one.at}, which is not in {where}: set replaces=null to add a file, or mend the place."
    elif base is not None and hashlib.sha256(base).hexdigest() != one.replaces:
        yield (
            f"{key}.replaces is {_short(one.replaces)}, but {one.at} of {where} is "
            f"{hashlib.sha256(base).hexdigest()}: your file was made from another one; make it anew from this one and "
            "say so."
        )


def _short(digest: Any) -> str:
    return "null" if digest is None else str(digest)[:12]
