"""Index and headers of a folder of safetensors files, checked as a whole before anything is mapped.

Imports no torch: a checkpoint can be identified and checked where only the control side runs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from workloads.loading.tensor_table import DTYPE_BYTES, TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the format's own limit
_SHOWN = 20  # problems printed of an error; all of them are in `problems`
_WHOLE = 64 << 20  # files up to this size enter the identity with every byte, larger ones with samples
_SAMPLES, _SAMPLE = 256, 4096


class CheckpointError(Exception):
    """A checkpoint that cannot be used, with every problem found, each one a sentence."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        more = len(self.problems) - _SHOWN
        tail = [f"… and {more} more problems like these."] if more > 0 else []
        super().__init__("\n".join([*self.problems[:_SHOWN], *tail]))


class TensorMeta(NamedTuple):
    """Stored dtype (safetensors name) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Location(NamedTuple):
    """Where a tensor lies: file name and the byte at which its data starts in that file."""

    file: str
    begin: int
    meta: TensorMeta


@dataclass(frozen=True)
class ShardFile:
    """One file: its size and time of change (ns), the digest of its header, its header's free-form entries, its
    tensors in file order."""

    size: int
    modified: int
    header_digest: str
    metadata: dict[str, str]
    tensors: dict[str, Location]


@dataclass(frozen=True)
class Layout:
    """A checked folder. `tensors` are in the order in which they lie in the files."""

    folder: Path
    files: dict[str, ShardFile]
    tensors: dict[str, Location]

    def identity(self) -> str:
        """32 hex digits that stay the same wherever the folder is copied and change when its content does.

        Covers headers, sizes and bytes: all of files up to 64 MiB, 256 evenly spaced blocks of 4 KiB of larger
        ones. A change of a large file between those blocks, with the same header, does not show.
        """
        digest = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            content = _content_digest(self.folder / name, file.size)
            digest.update(json.dumps([name, file.size, file.header_digest, content]).encode())
        return digest.hexdigest()[:32]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError when it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: a checkpoint brings the configuration of its model."
        ) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Copy the file again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object. Copy the file again.")
    return config


def read_layout(folder: Path) -> Layout:
    """Read the index and every header of `folder`.

    Raises CheckpointError with all problems at once: missing folder or files, broken JSON, truncated files,
    offsets that overlap or leave holes, and tensors on which index and files disagree.
    """
    indexed = _read_index(folder)
    problems: list[str] = []
    files: dict[str, ShardFile] = {}
    tensors: dict[str, Location] = {}
    for name in indexed or [SINGLE]:
        try:
            files[name] = _read_shard(folder / name)
        except CheckpointError as error:
            problems += error.problems
            continue
        for tensor, location in files[name].tensors.items():
            if tensor in tensors:
                problems.append(
                    f"{folder}: tensor {tensor!r} is in both {tensors[tensor].file} and {name}; it must be in one "
                    "file only. Write the checkpoint again."
                )
            tensors[tensor] = location
        if indexed is not None:
            problems += _disagreements(folder, name, indexed[name], set(files[name].tensors))
    if problems:
        raise CheckpointError(problems)
    return Layout(folder, files, tensors)


def mismatches(
    folder: Path, stored: Mapping[str, TensorMeta], specs: Iterable[TensorSpec], ignore: Sequence[str] = ()
) -> list[str]:
    """Differences in names, shapes and dtypes from what a model needs, each a sentence. `ignore`: prefixes of
    tensors that it does not load."""
    problems: list[str] = []
    expected = {spec.name: spec for spec in specs}
    remedy = "Give the checkpoint of the configured model, or configure the model of this checkpoint."
    for spec in expected.values():
        if spec.name not in stored:
            problems.append(
                f"{folder}: tensor {spec.name!r} is missing, expected {spec.dtype} {spec.shape}. {remedy}"
            )
            continue
        dtype, shape = stored[spec.name]
        if shape != spec.shape:
            problems.append(
                f"{folder}: tensor {spec.name!r} has shape {shape}, expected {spec.shape}. {remedy}"
            )
        if dtype != spec.dtype:
            problems.append(
                f"{folder}: tensor {spec.name!r} has dtype {dtype}, expected {spec.dtype}. {remedy}"
            )
    problems += (
        f"{folder}: tensor {name!r} is unexpected, the model has none of this name. {remedy}"
        for name in sorted(stored.keys() - expected.keys())
        if not name.startswith(tuple(ignore))
    )
    return problems


def _read_index(folder: Path) -> dict[str, set[str]] | None:
    """File name -> tensors that the index places in it; None for a single-file checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. Give the folder of a checkpoint.")
    path = folder / INDEX
    if not path.exists():
        if (folder / SINGLE).exists():
            return None
        found = (
            ", ".join(sorted(p.name for p in folder.glob("*.safetensors"))[:3]) or "no *.safetensors files"
        )
        raise CheckpointError(
            f"{folder}: neither {INDEX} nor {SINGLE} is there (found {found}). Give a complete checkpoint folder."
        )
    weight_map = _json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: 'weight_map' is missing or empty. Fetch the index file again.")
    placed: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or (file not in placed and Path(file).name != file):
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is placed in {file!r}, which is not a plain file name in this folder. "
                "Fetch the index file again."
            )
        placed.setdefault(file, set()).add(tensor)
    return dict(sorted(placed.items()))


def _disagreements(folder: Path, file: str, indexed: set[str], held: set[str]) -> list[str]:
    path, remedy = folder / file, "Fetch the file and the index again; they are from different versions."
    lacking = [
        f"{path}: tensor {t!r} is missing, {INDEX} places it here. {remedy}" for t in sorted(indexed - held)
    ]
    extra = [
        f"{path}: holds tensor {t!r}, which {INDEX} does not place here. {remedy}"
        for t in sorted(held - indexed)
    ]
    return lacking + extra


def _read_shard(path: Path) -> ShardFile:
    """Check one file's header against its size and read it."""
    again = "Fetch the file again."
    if not path.is_file():
        raise CheckpointError(f"{path}: the file is missing, but the index names it. {again}")
    size, modified = path.stat().st_size, path.stat().st_mtime_ns
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise CheckpointError(
                f"{path}: the header should have {length} bytes, the file has {size} in all: it is truncated or not "
                f"a safetensors file. {again}"
            )
        raw = file.read(length)
    header = _json_object(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        found = type(metadata).__name__
        raise CheckpointError(f"{path}: '__metadata__' is a {found}, expected a JSON object. {again}")
    parsed = [_parse_entry(path, name, entry) for name, entry in header.items()]
    broken = [entry for entry in parsed if isinstance(entry, str)]
    if broken:
        raise CheckpointError(broken)
    entries = sorted((e for e in parsed if not isinstance(e, str)), key=itemgetter(2, 3))
    _check_offsets(path, entries, size - 8 - length)
    tensors = {e.name: Location(path.name, 8 + length + e.begin, e.meta) for e in entries}
    return ShardFile(size, modified, hashlib.sha256(raw).hexdigest(), metadata, tensors)


class _Entry(NamedTuple):
    name: str
    meta: TensorMeta
    begin: int
    end: int


def _parse_entry(path: Path, name: str, entry: Any) -> _Entry | str:
    """One tensor of a header, or the sentence that says what is wrong with it."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        integers = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        width = DTYPE_BYTES.get(dtype)
    except (KeyError, TypeError, ValueError):
        return (
            f"{path}: the header entry of {name!r} lacks dtype, shape or data_offsets. Fetch the file again."
        )
    if width is None:
        known = ", ".join(DTYPE_BYTES)
        return f"{path}: tensor {name!r} has dtype {dtype!r}, which is not read here. Convert it to one of {known}."
    if not integers:
        return (
            f"{path}: tensor {name!r} has shape {shape} at [{begin}, {end}], expected non-negative integers. "
            "Fetch the file again."
        )
    if end - begin != prod(shape) * width:
        return (
            f"{path}: tensor {name!r} of {dtype} {shape} needs {prod(shape) * width} bytes, its data_offsets "
            f"[{begin}, {end}] give {end - begin}. Fetch the file again."
        )
    return _Entry(name, TensorMeta(dtype, tuple(shape)), begin, end)


def _check_offsets(path: Path, entries: Sequence[_Entry], available: int) -> None:
    """Data must be one gapless run that ends with the file."""
    problems: list[str] = []
    cursor = 0
    for name, _, begin, end in entries:
        if begin != cursor:
            kind = "overlaps the tensor before it" if begin < cursor else "leaves a hole before it"
            problems.append(
                f"{path}: tensor {name!r} {kind}: its data starts at {begin}, expected {cursor}. Write the file again."
            )
        cursor = max(cursor, end)
    if cursor > available:
        last = entries[-1].name
        problems.append(
            f"{path}: the file is truncated: its header describes {cursor} bytes of data (the last is tensor "
            f"{last!r}), the file has {available}. Fetch the file again."
        )
    elif cursor < available and not problems:
        problems.append(
            f"{path}: the file has {available} bytes of data, its header describes {cursor}. Write the file again."
        )
    if problems:
        raise CheckpointError(problems)


def _json_object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:  # JSON and UTF-8 errors both
        raise CheckpointError(f"{path}: broken JSON ({error}). Fetch the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, found {type(value).__name__}. Fetch it again."
        )
    return value


def _content_digest(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        for sample in range(_SAMPLES if size > _WHOLE else 0):
            file.seek((size - _SAMPLE) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
