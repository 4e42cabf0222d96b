"""Files of this engine's own, which a step `save` writes and a start reads: a folder with `saved.json`, written last.

tensorizer_raw: the tensors of a checkpoint, shared by all ranks. sharded_state: each rank's parameters in the layout
of loading. tensorizer: each rank's tensors as post-processing left them (`workloads.loading.snapshot`).
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from workloads.loading.checkpoint import TORCH_DTYPES, CheckpointReader, check_region, open_checkpoint
from workloads.loading.paths import MANIFEST
from workloads.loading.shards import CheckpointError, TensorMeta
from workloads.loading.snapshot import Snapshot, adopt, take
from workloads.loading.tensorizer_files import read_file, write_files
from workloads.loading.weights import ModelRoot, Region, narrow
from workloads.loading.writer import write_checkpoint
from workloads.spec import GangSpec

SHARD_BYTES = 4 << 30
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Roots = Mapping[str, ModelRoot]


def layout_of(spec: GangSpec, via: str, checkpoint: str) -> dict[str, Any]:
    """What files of the kind `via` are made from and for, which a start must have too."""
    architecture = spec.model.architecture
    model = {"architecture": architecture, "dimensions": asdict(getattr(spec.model, architecture))}
    of = {"via": via, **model, "checkpoint": asdict(spec.checkpoints[checkpoint])}
    if via == "tensorizer_raw":
        return of
    parallelism = {
        key: getattr(spec.parallelism, key) for key in ("tp", "dp", "ep", "pp", "redundant_experts")
    }
    return {**of, **parallelism, "moe_kernel": spec.backend.moe_kernel}


def require_layout(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Raises CheckpointError with each difference between what the files in `folder` are made for and `wanted`."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a step `save` did not end there. Save the state again.")
    found = json.loads(path.read_text())
    problems = [
        f"{folder}: it was saved with {key} {found.get(key)!r}, this engine has {wanted[key]!r}. Save the state with "
        "the same model, parallelism and kernel."
        for key in wanted
        if found.get(key) != wanted[key]
    ]
    if problems:
        raise CheckpointError(problems)


def write_manifest(folder: Path, layout: Mapping[str, Any]) -> None:
    """Says that the files of all ranks are there."""
    _write_json(folder / MANIFEST, layout)


# Raw: a checkpoint -----------------------------------------------------------------------------------


def save_raw(folder: Path, reader: CheckpointReader) -> None:
    """All tensors of a checkpoint, in its order."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = write_files(folder, "raw", ((name, reader.get(name)) for name in reader.names()))
    tensors = {name: [file, *reader.meta(name)] for name, file in files.items()}
    _write_json(folder / "raw.json", {"identity": reader.identity(), "tensors": tensors})


class RawCheckpoint:
    """`CheckpointReader` of what `save_raw` wrote. The two files read last are kept: a load asks nearly in order."""

    def __init__(self, folder: Path) -> None:
        index = _read_json(folder / "raw.json")
        self._folder, self._identity = folder, str(index["identity"])
        self._files = {name: file for name, (file, _, _) in index["tensors"].items()}
        self._meta = {
            name: TensorMeta(dtype, tuple(shape)) for name, (_, dtype, shape) in index["tensors"].items()
        }
        self._read = lru_cache(maxsize=2)(lambda file: read_file(folder / file))

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def nbytes(self) -> int:
        return sum(meta.nbytes for meta in self._meta.values())

    def names(self) -> Iterator[str]:
        return iter(self._meta)

    def meta(self, name: str) -> TensorMeta:
        return self._meta[name]

    def get(self, name: str) -> torch.Tensor:
        tensor = self._read(self._files[name])[name]
        dtype, shape = self._meta[name]
        if tensor.dtype is not TORCH_DTYPES[dtype] or tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._folder / self._files[name]}: tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"raw.json says {dtype} {shape}. Write the files again, with a step `save`."
            )
        return tensor

    def slice(self, name: str, region: Region) -> torch.Tensor:
        check_region(name, self.meta(name), region)
        return narrow(self.get(name), region)

    def identity(self) -> str:
        return self._identity

    def require_unchanged(self) -> None:
        """Nothing to ask: every file is read as a whole, and verified by its hashes then."""


# Sharded: parameters of one rank ---------------------------------------------------------------------


def save_parameters(folder: Path, rank: int, roots: Roots) -> None:
    """This rank's parameters, padding included, by `ROOT:PATH.PARAMETER`."""
    held = {
        f"{root}:{path}.{name}": tensor
        for root, model in roots.items()
        for path, module in model.weight_modules()
        for name, tensor in module.loaded_weights().items()
    }
    metas = [(name, TensorMeta(DTYPE_NAMES[t.dtype], tuple(t.shape))) for name, t in held.items()]
    write_checkpoint(
        folder / f"rank-{rank:05d}", f"parameters of rank {rank}", metas, held.__getitem__, SHARD_BYTES, {}
    )


class RankParameters:
    """Reader of one model's parameters on one rank, by `PATH.PARAMETER`. Raises CheckpointError, with every
    difference, unless the files hold exactly what the models declare."""

    def __init__(self, folder: Path, rank: int, roots: Roots) -> None:
        self._reader = open_checkpoint(folder / f"rank-{rank:05d}")
        stored = {name: self._reader.meta(name) for name in self._reader.names()}
        declared = {
            f"{root}:{path}.{name}": TensorMeta(DTYPE_NAMES[weight.dtype], weight.shape)
            for root, model in roots.items()
            for path, module in model.weight_modules()
            for name, weight in module.weights.items()
        }
        problems = [
            f"{self._reader.folder}: parameter {name!r} is {stored.get(name, 'missing')}, this engine has "
            f"{declared.get(name, 'none of this name')}. Save the state with the same code and layout."
            for name in sorted(stored.keys() | declared.keys())
            if stored.get(name) != declared.get(name)
        ]
        if problems:
            raise CheckpointError(problems)

    def of(self, root: str) -> "_OfRoot":
        return _OfRoot(self._reader, root)

    def require_unchanged(self) -> None:
        self._reader.require_unchanged()


class _OfRoot:
    def __init__(self, reader: CheckpointReader, root: str) -> None:
        self._reader, self._root = reader, root

    def slice(self, name: str, region: Region) -> torch.Tensor:
        return self._reader.slice(f"{self._root}:{name}", region)


# Processed: everything of one rank -------------------------------------------------------------------


def save_processed(folder: Path, rank: int, roots: Roots) -> None:
    """Every tensor that the models of this rank hold, and where: no step of loading is needed to put it back."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    snapshot = take(roots)
    files = write_files(folder, f"rank-{rank:05d}", snapshot.tensors.items())
    _write_json(
        folder / f"rank-{rank:05d}.json", {"files": sorted(set(files.values())), "places": snapshot.places}
    )


class ProcessedState:
    """What `save_processed` wrote of one rank, read and checked as a whole before any of it is put in place."""

    def __init__(self, folder: Path, rank: int) -> None:
        index = _read_json(folder / f"rank-{rank:05d}.json")
        tensors: dict[str, torch.Tensor] = {}
        for file in index["files"]:
            tensors |= read_file(folder / file)
        self._snapshot = Snapshot(tensors, index["places"])

    def adopt(self, root: str, model: ModelRoot) -> Iterator[tuple[str, int]]:
        """Put one model's tensors in place; yields (path of module, bytes) as it goes."""
        return adopt(self._snapshot, root, model)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{path}: it is missing or broken ({error}). Save the state again.") from error
