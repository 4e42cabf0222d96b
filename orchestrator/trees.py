"""The code that an arm's ranks import: its tree as it lies, or made in the store from a commit and files laid over it.

What waits in a queue runs from copies in the store, so that nobody has to leave a checkout alone until it starts.
Files over the engine's own package go into a copy of the package made of links, which comes before it on the path.
"""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator import provenance
from orchestrator.cell import digest
from orchestrator.engine_env import package_folder
from orchestrator.failure import AttemptError
from orchestrator.store import Store, move_in
from workloads.source import SOURCES, files_hash, files_in, is_source

TREES = "trees"  # folder of the store: made trees by their hash
LAID = "files"  # folder in that one: copies of files that are laid over others, by their SHA-256
DRIVER = ("orchestrator", *SOURCES, "slurm")  # what a driver runs of its checkout

Laid = Sequence[Mapping[str, Any]]  # of a frozen arm: "at", "file", "sha256", "replaces"


def arm_source(tree: Path, commit: str | None, overlay: Laid) -> str:
    """SHA-256 of what the arm runs of this project. Raises ProvenanceError."""
    own = tuple((one["at"], one["file"]) for one in overlay if is_source(one["at"]))
    return provenance.source_hash(tree, commit, own)


def driver_tree(store: Store) -> Path:
    """A copy of what a driver runs of this checkout, made where it is not there."""
    files = dict(files_in(provenance.checkout(), DRIVER))
    made = store.root / TREES / str(files_hash(files.items()))
    if not made.is_dir():
        make_in_place(made, partial(_write, files))
    return made


def keep(arm: Mapping[str, Any], store: Store) -> None:
    """Copies what an arm runs of this project, and the files laid over its engine, into the store: whoever runs it
    later does not depend on where they came from. What is no longer as the cell froze it is left alone, and refused
    where it would run."""
    made, overlay = store.root / TREES / arm["source"], arm.get("overlay", [])
    try:
        laid = _contents([one for one in overlay if not is_source(one["at"])], store)
        files = {} if made.is_dir() else _files(arm, store)
    except (AttemptError, provenance.ProvenanceError):
        return
    if files and files_hash(files.items()) == arm["source"]:
        make_in_place(made, partial(_write, files))
    for content in laid.values():
        copy = _copy(hashlib.sha256(content).hexdigest(), store)
        if not copy.is_file():
            make_in_place(copy.parent, partial(_write, {copy.name: content}))


def is_kept(arm: Mapping[str, Any], store: Store) -> bool:
    return (store.root / TREES / str(arm["source"])).is_dir()


def source_tree(arm: Mapping[str, Any], store: Store) -> Path:
    """The folder whose workloads/ and collectors/ run. Raises AttemptError when they are not what the cell froze."""
    tree, made = Path(arm["path"]), store.root / TREES / arm["source"]
    own = any(is_source(one["at"]) for one in arm.get("overlay", []))
    if is_kept(arm, store):
        tree = made
    elif arm["commit"] is not None or own:
        files = _files(arm, store)
        make_in_place(made, partial(_write, files))
        tree = made
    found = files_hash(provenance.tree_files(tree).items())
    if found != arm["source"]:
        advice = "Remove this copy, which is made again" if tree == made else "Start the experiment again"
        raise AttemptError(
            "code",
            f"{'/ and '.join(SOURCES)}/ of {tree} have changed since the cell was frozen: their hash is "
            f"{str(found)[:12]}, the cell says {arm['source'][:12]}. {advice}, or restore the files.",
        )
    return tree


def _files(arm: Mapping[str, Any], store: Store) -> dict[str, bytes]:
    """By name, of what an arm runs of this project."""
    own = [one for one in arm.get("overlay", []) if is_source(one["at"])]
    return {**provenance.tree_files(Path(arm["path"]), arm["commit"]), **_contents(own, store)}


def _contents(overlay: Laid, store: Store) -> Mapping[str, bytes]:
    """By place, of files that are kept, or still what the cell froze. Raises AttemptError."""
    found = {}
    for one in overlay:
        copy = _copy(one["sha256"], store)
        file = copy if copy.is_file() else Path(one["file"])
        found[one["at"]] = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(found[one["at"]]).hexdigest() != one["sha256"]:
            raise AttemptError(
                "code",
                f"{file}, which is laid over {one['at']}, is gone or has changed since the cell was frozen: start the "
                "experiment again, or restore the file.",
            )
    return found


def _copy(sha256: str, store: Store) -> Path:
    """Where a file that is laid over something is kept."""
    return store.root / TREES / LAID / sha256 / "content"


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def overlaid_package(arm: Mapping[str, Any], python: str, store: Store) -> Path | None:
    """Folder that holds the engine's package with the arm's files over it, None where there are none.

    Raises AttemptError where the package is not the one that the files were made from.
    """
    overlay = [one for one in arm.get("overlay", []) if not is_source(one["at"])]
    if not overlay:
        return None
    package = package_folder(python, overlay[0]["at"].partition("/")[0])
    for one in overlay:
        file = package.parent / one["at"]
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        if found != one["replaces"]:
            raise AttemptError(
                "code",
                f"{file} is not what code.*.overlay replaces: its SHA-256 is {found}, the cell says {one['replaces']}.",
            )
    made = store.root / TREES / digest([str(package), [(one["at"], one["sha256"]) for one in overlay]])
    if not made.is_dir():
        files = _contents(overlay, store)
        make_in_place(made, lambda folder: _link_around(package, files, folder))
    return made


def _link_around(package: Path, files: Mapping[str, bytes], folder: Path) -> None:
    """The folders on the way to each file are real, everything beside them is a link into the package."""
    ways = {way.as_posix() for at in files for way in PurePosixPath(at).parents if way.name}
    for way in sorted(ways):  # a folder comes before those in it
        (folder / way).mkdir(parents=True, exist_ok=True)
        for entry in _entries(package.parent / way):
            name = f"{way}/{entry.name}"
            if name not in files and name not in ways:
                (folder / name).symlink_to(entry)
    _write(files, folder)


def _entries(folder: Path) -> Iterator[Path]:
    return (
        (entry for entry in folder.iterdir() if entry.name != "__pycache__") if folder.is_dir() else iter(())
    )


def make_in_place(final: Path, make: Callable[[Path], None]) -> None:
    """Has a folder made under another name and renames it when it is complete."""
    temporary = final.with_name(f".{final.name}-{secrets.token_hex(4)}")
    temporary.mkdir(mode=0o700, parents=True)
    try:
        make(temporary)
        move_in(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
