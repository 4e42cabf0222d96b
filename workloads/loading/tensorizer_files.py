"""Files of the `tensorizer` package: named tensors, verified by their hashes as they are read.

Only its serializer and deserializer are used, which know tensors alone; its stand-ins for torch.save and torch.load,
which unpickle, are not. A file is read as a whole, since the package reads forward only; large sets of tensors are
therefore divided over several files.
"""

import importlib
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from workloads.loading.shards import CheckpointError

FILE_BYTES = 256 << 20  # of the tensors of one file, unless a single one is larger
NAME_BYTES = 150_000  # of names and shapes in one file: the package keeps 256 KiB for its table of contents
ENTRY_BYTES = 100  # of a name in that table, beside the name


class TensorizerMissingError(Exception):
    """The package is not in the engine's environment."""


def _package() -> Any:
    try:
        return importlib.import_module("tensorizer")
    except ImportError as error:
        raise TensorizerMissingError(
            "Files of tensorizer need the package `tensorizer` in the environment of the ranks: install the extra of "
            "that name, pip install '.[tensorizer]', or choose another load path."
        ) from error


def write_files(folder: Path, stem: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Write `tensors` to as many files STEM-00000.tensors as they need; returns the file of each name."""
    files: dict[str, str] = {}
    for number, batch in enumerate(_batches(tensors)):
        file = f"{stem}-{number:05d}.tensors"
        _write(folder / file, batch)
        files.update(dict.fromkeys(batch, file))
    return files


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file. Raises CheckpointError when it is missing, cut short or otherwise not as written."""
    package = _package()
    again = "Write the file again, with a step `save`."
    mismatch: type[Exception] = importlib.import_module("tensorizer.serialization").HashMismatchError
    try:
        file = package.TensorDeserializer(str(path), device="cpu", verify_hash=True)
        try:
            return {name: tensor.detach() for name, tensor in file.items()}
        finally:
            file.close()
    except (OSError, ValueError, RuntimeError, EOFError, struct.error, mismatch) as error:
        raise CheckpointError(f"{path}: no complete tensorizer file ({error}). {again}") from error


def _batches(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    batch: dict[str, torch.Tensor] = {}
    nbytes = names = 0
    for name, tensor in tensors:
        entry = len(name) + ENTRY_BYTES
        if batch and (nbytes + tensor.nbytes > FILE_BYTES or names + entry > NAME_BYTES):
            yield batch
            batch, nbytes, names = {}, 0, 0
        batch[name] = tensor.detach().contiguous()
        nbytes, names = nbytes + tensor.nbytes, names + entry
    if batch:
        yield batch


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The file appears complete or not at all."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        serializer = _package().TensorSerializer(str(temporary))
        serializer.write_state_dict(dict(tensors))
        serializer.close()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
