"""What an interpreter would run: the hash of a source tree and the versions of installed packages."""

import hashlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from pathlib import Path

SOURCES = ("workloads", "collectors")  # what runs beside the engine and makes the records
ENGINE_PACKAGES = ("torch", "numpy", "safetensors", "triton", "deep_gemm", "vllm", "ray")


def files_in(tree: Path, folders: Sequence[str] = SOURCES) -> Iterable[tuple[str, bytes]]:
    """Names, from the tree on, and contents of the sources as they lie there."""
    for folder in folders:
        for path in (tree / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(tree).as_posix(), path.read_bytes()


def is_source(name: str) -> bool:
    """Whether a path, written from the tree on, lies in the sources."""
    return name.partition("/")[0] in SOURCES


def files_hash(files: Iterable[tuple[str, bytes]]) -> str | None:
    """SHA-256 over names and contents, in the order of the names; None of no files."""
    total = hashlib.sha256()
    found = sorted(files)
    for name, content in found:
        total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest() if found else None


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
