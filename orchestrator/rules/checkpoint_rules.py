"""Checks the weights that a config names before anything is submitted: files, names, shapes, dtypes, finite values."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path

from orchestrator.config.schema import Root
from orchestrator.provenance import checkout
from orchestrator.transformers_config import drafts, read_model_config
from workloads.loading.shards import CheckpointError, TensorMeta, mismatches, read_layout
from workloads.loading.tensor_table import every_tensor
from workloads.models.architectures import ARCHITECTURES, tensor_table

SHOWN = 5  # problems of one checkpoint
SCANNED_BYTES = 16 << 30  # of a checkpoint whose every value is read before submission; takes a minute or two
SCAN_TIMEOUT_S = 900

Stored = Mapping[str, TensorMeta]


def checkpoint_problems(root: Root) -> Iterator[str]:
    """One sentence for each of the first problems of each checkpoint given by path, and of two that do not match."""
    model = root.model
    native = model.architecture in ARCHITECTURES
    dimensions = json.dumps(asdict(getattr(model, model.architecture))) if native else ""
    folders = {name: Path(c.path).expanduser() for name, c in root.checkpoints.items() if c.path is not None}
    for name, folder in folders.items():
        yield from _first(f"checkpoints.{name}.path", _problems(folder, model.architecture, dimensions))
    if model.architecture == "transformers":
        own = drafts(root)
        for together in ([n for n in folders if n not in own], [n for n in folders if n in own]):
            for first, other in pairwise(together):
                found = _differences(folders[first], folders[other])
                yield from _first(f"checkpoints.{other}.path, beside checkpoints.{first}.path", found)


def _first(key: str, found: Sequence[str]) -> Iterator[str]:
    yield from (f"{key}: {problem}" for problem in found[:SHOWN])
    if len(found) > SHOWN:
        yield f"{key}: {len(found) - SHOWN} more problems like these."


@cache
def _problems(folder: Path, architecture: str, dimensions: str) -> list[str]:
    """Of one folder, once for all cells that name it. dimensions: of the model, as JSON, where a table of its tensors
    follows from them."""
    try:
        stored = _stored(folder)
    except CheckpointError as error:
        return error.problems
    if architecture in ARCHITECTURES:
        wrong = _against_table(folder, stored, architecture, dimensions)
    else:
        wrong = _against_engine(folder)
    if wrong or sum(meta.nbytes for meta in stored.values()) > SCANNED_BYTES:
        return wrong
    return _not_finite(str(folder))


def _against_table(folder: Path, stored: Stored, architecture: str, dimensions: str) -> list[str]:
    table = tensor_table(architecture)
    expected = every_tensor(table.sections(ARCHITECTURES[architecture](**json.loads(dimensions))))
    return mismatches(folder, stored, expected, table.NOT_LOADED)


def _against_engine(folder: Path) -> list[str]:
    """Which tensors a model has only its engine knows; the configuration by which it does must be there."""
    try:
        read_model_config(folder)
    except CheckpointError as error:
        return error.problems
    return []


@cache
def _stored(folder: Path) -> Stored:
    """Raises CheckpointError with all problems of index and headers."""
    return {name: location.meta for name, location in read_layout(folder).tensors.items()}


@cache
def _differences(folder: Path, other: Path) -> list[str]:
    """An update changes values only: in names, shapes and dtypes both checkpoints are the same."""
    try:
        here, there = _stored(folder), _stored(other)
    except CheckpointError:
        return []  # told already, of the folder itself
    remedy = "Give two checkpoints of one model."
    missing = [
        f"tensor {name!r} is in {folder} and not in {other}. {remedy}" for name in here if name not in there
    ]
    extra = [
        f"tensor {name!r} is in {other} and not in {folder}. {remedy}" for name in there if name not in here
    ]
    changed = [
        f"tensor {name!r} is {meta.dtype} {meta.shape} in {folder} and {there[name].dtype} {there[name].shape} in "
        f"{other}. {remedy}"
        for name, meta in here.items()
        if name in there and there[name] != meta
    ]
    return missing + extra + changed


def _not_finite(path: str) -> list[str]:
    """Reads every value, in a process of its own: the control side imports no torch."""
    command = [sys.executable, "-m", "workloads.loading.checkpoint", path]
    done = subprocess.run(command, cwd=checkout(), capture_output=True, text=True, timeout=SCAN_TIMEOUT_S)
    if done.returncode not in (0, 1):
        return [f"{path} could not be read: {done.stderr.strip().splitlines()[-1]}"]
    return done.stdout.splitlines()
