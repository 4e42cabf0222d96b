"""Which code, packages and machine made a result, without secrets; and the hash that identifies a source tree."""

import hashlib
import io
import os
import platform
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.config.text import SECRET_NAME
from workloads.source import ENGINE_PACKAGES, SOURCES, files_hash, files_in, package_versions

PACKAGES = (*ENGINE_PACKAGES, "hydra-core", "submitit")
REDACTED = "<redacted>"
THIS = "this"


class ProvenanceError(Exception):
    """A tree, commit or file that a config names is not there. The message is a full sentence."""


def checkout() -> Path:
    """The folder that holds the packages `workloads` and `collectors` of this process."""
    return Path(__file__).resolve().parent.parent


def tree(path: str | None) -> Path:
    """The folder that `path` of an arm names: by null, or THIS where an arm must be told from none, this checkout."""
    return checkout() if path in (None, THIS) else Path(str(path)).expanduser().resolve()


def collect() -> dict[str, Any]:
    """Everything written to `provenance.json`."""
    return {
        "git": git_state(checkout()),
        "source": source_hash(checkout()),
        "packages": package_versions(PACKAGES),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "environment": redacted(os.environ),
    }


def redacted(environment: Mapping[str, str]) -> dict[str, str]:
    """Names are kept, values of names that look like secrets are not, nor credentials inside URLs."""
    return {
        name: REDACTED if SECRET_NAME.search(name) else _without_credentials(value)
        for name, value in sorted(environment.items())
    }


def _without_credentials(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    user, at, host = rest.partition("@")
    return f"{scheme}://{REDACTED}@{host}" if separator and at and "/" not in user else value


def git_state(tree: Path) -> dict[str, Any]:
    """{"commit", "dirty": SHA-256 of the difference to it, or None}; both None outside a repository."""
    commit = _git(tree, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    difference = _git(tree, "diff", "HEAD", "--binary") or b""
    for name in (_git(tree, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0"):
        path = tree / os.fsdecode(name)
        if name and path.is_file():
            difference += name + b"\0" + path.read_bytes()
    dirty = hashlib.sha256(difference).hexdigest() if difference else None
    return {"commit": commit.decode().strip(), "dirty": dirty}


@cache
def resolve_commit(tree: Path, revision: str) -> str:
    """Full hash of a git revision of `tree`."""
    found = _git(tree, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if found is None:
        raise ProvenanceError(
            f"{revision!r} is not a commit of the git repository at {tree}: name a branch, a tag or a hash that "
            "`git rev-parse` knows there."
        )
    return found.decode().strip()


@cache
def source_hash(tree: Path, commit: str | None = None, overlay: tuple[tuple[str, str], ...] = ()) -> str:
    """SHA-256 over names and contents of workloads/ and collectors/, as they lie there or at `commit`, with files laid
    over them: (name, file)."""
    laid = {name: Path(file).read_bytes() for name, file in overlay}
    found = files_hash({**tree_files(tree, commit), **laid}.items())
    assert found is not None, "tree_files refuses an empty tree"
    return found


def tree_files(tree: Path, commit: str | None = None) -> Mapping[str, bytes]:
    """Content by name of workloads/ and collectors/, as they lie there or at `commit`."""
    found = dict(_files_at(tree, commit) if commit is not None else files_in(tree))
    if not found:
        raise ProvenanceError(
            f"{tree} holds no workloads/ and collectors/: an arm's path must be a source tree of this project."
        )
    return found


def _files_at(tree: Path, commit: str) -> Iterable[tuple[str, bytes]]:
    archive = _git(tree, "archive", "--format=tar", commit, "--", *SOURCES)
    if archive is None:
        raise ProvenanceError(f"Commit {commit} of {tree} has no {' and '.join(SOURCES)} folders.")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                yield member.name, content.read()


def folder_state(folder: Path) -> str | None:
    """Names, sizes and times of a checkpoint's files: cheap, and any rewrite changes it. None where the folder is
    not visible from this machine."""
    if not folder.is_dir():
        return None
    state = [
        (f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir()) if f.is_file()
    ]
    return "stat:" + hashlib.sha256(repr(state).encode()).hexdigest()


def _git(tree: Path, *arguments: str) -> bytes | None:
    """Output of a git command in `tree`, None when it fails or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, timeout=60)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
