"""Writes a checkpoint folder shard by shard and publishes it in one step, so that no reader sees half of it."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from workloads import heartbeat
from workloads.loading.shards import INDEX, CheckpointError, TensorMeta, read_layout
from workloads.loading.tensor_table import DTYPE_BYTES

ABANDONED_S = (
    3600  # a temporary folder in which nothing was written for this long belongs to a killed process
)

Named = tuple[str, TensorMeta]


def write_checkpoint(
    folder: Path,
    source: str,
    tensors: Iterable[Named],
    make: Callable[[str], torch.Tensor],
    shard_bytes: int,
    extra_files: Mapping[str, bytes],
) -> Path:
    """Write `tensors` below `folder` unless the same are there already, holding one tensor at a time in memory.

    source: says what the content was made from; recorded in the index and in every shard. An existing folder
    with the same source is kept. Two processes may write the same folder at once: both return it, complete.
    make: name -> tensor of exactly the announced dtype and shape.

    Raises CheckpointError when the folder holds something else, or a tensor is not as announced.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return _require_source(folder, source)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(folder)
    work = Path(tempfile.mkdtemp(prefix=_work_prefix(folder), dir=folder.parent))
    try:
        _write_files(work, source, list(tensors), make, shard_bytes, extra_files)
        try:
            work.rename(folder)  # atomic; refused when another process has published there meanwhile
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return _require_source(folder, source)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _require_source(folder: Path, source: str) -> Path:
    """Accept a folder that is complete and was made from `source`."""
    remedy = "Remove the folder or write to another one."
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder}: something is there that is no checkpoint (no {INDEX}). {remedy}")
    layout = read_layout(folder)
    sources = {file.metadata.get("source", "nothing recorded") for file in layout.files.values()}
    if sources != {source}:
        raise CheckpointError(
            f"{folder}: the checkpoint there was made from {sorted(sources)}, expected {source!r}. {remedy}"
        )
    return folder


def _write_files(
    work: Path,
    source: str,
    tensors: Sequence[Named],
    make: Callable[[str], torch.Tensor],
    shard_bytes: int,
    extra_files: Mapping[str, bytes],
) -> None:
    shards = list(_split(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (work / file).open("xb") as out:
            _write_shard(out, source, shard, make)
            _sync(out)
        weight_map.update((name, file) for name, _ in shard)
    index = {
        "metadata": {"total_size": sum(meta.nbytes for _, meta in tensors), "source": source},
        "weight_map": weight_map,
    }
    for name, content in {**extra_files, INDEX: json.dumps(index, indent=1).encode()}.items():
        with (work / name).open("xb") as out:
            out.write(content)
            _sync(out)
    _sync_folder(work)


def _split(tensors: Sequence[Named], shard_bytes: int) -> Iterator[list[Named]]:
    """Fill shards in order. Inside one, wide dtypes come first, so that every tensor is aligned to its dtype."""
    shard: list[Named] = []
    used = 0
    for name, meta in tensors:
        if shard and used + meta.nbytes > shard_bytes:
            yield sorted(shard, key=_width, reverse=True)
            shard, used = [], 0
        shard.append((name, meta))
        used += meta.nbytes
    if shard:
        yield sorted(shard, key=_width, reverse=True)


def _width(tensor: Named) -> int:
    return DTYPE_BYTES[tensor[1].dtype]


def _write_shard(
    out: BinaryIO, source: str, shard: Sequence[Named], make: Callable[[str], torch.Tensor]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "source": source}}
    offset = 0
    for name, meta in shard:
        header[name] = {
            "dtype": meta.dtype,
            "shape": list(meta.shape),
            "data_offsets": [offset, offset + meta.nbytes],
        }
        offset += meta.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # data starts aligned
    out.write(len(raw).to_bytes(8, "little") + raw)
    for name, meta in shard:
        tensor = make(name)
        if tensor.nbytes != meta.nbytes or tuple(tensor.shape) != meta.shape:
            raise CheckpointError(
                f"Tensor {name!r} was announced as {meta.dtype} {meta.shape} and made as {tensor.dtype} "
                f"{tuple(tensor.shape)}. Announce what is written."
            )
        heartbeat.advance()
        out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _work_prefix(folder: Path) -> str:
    return f".{folder.name}.tmp-"


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed writers of the same folder left behind."""
    for work in folder.parent.glob(f"{_work_prefix(folder)}*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be tidying up or publishing it
            newest = max(path.stat().st_mtime for path in [work, *work.iterdir()])
            if time.time() - newest > ABANDONED_S:
                shutil.rmtree(work, ignore_errors=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
