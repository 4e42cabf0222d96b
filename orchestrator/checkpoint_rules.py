"""Checks the weights that a config names before anything is submitted: files, names, shapes, dtypes, finite values."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

from orchestrator.provenance import checkout
from orchestrator.schema import Root
from workloads.loading.shards import CheckpointError, mismatches, read_layout
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.tensors import VISION_PREFIXES, checkpoint_tensors

SHOWN = 5  # problems of one checkpoint
SCANNED_BYTES = 16 << 30  # of a checkpoint whose every value is read before submission; takes a minute or two
SCAN_TIMEOUT_S = 900


def checkpoint_problems(root: Root) -> Iterator[str]:
    """One sentence for each of the first problems of each checkpoint given by path."""
    for name, checkpoint in root.checkpoints.items():
        if checkpoint.path is None:
            continue
        path = str(Path(checkpoint.path).expanduser())
        found = _problems(path, json.dumps(asdict(root.model.kimi_k3)))
        yield from (f"checkpoints.{name}.path: {problem}" for problem in found[:SHOWN])
        if len(found) > SHOWN:
            yield f"checkpoints.{name}.path: {len(found) - SHOWN} more problems like these."


@cache
def _problems(path: str, model: str) -> list[str]:
    """Of one folder, once for all cells that name it. model: its config as JSON."""
    try:
        layout = read_layout(Path(path))
    except CheckpointError as error:
        return error.problems
    stored = {name: location.meta for name, location in layout.tensors.items()}
    specs = checkpoint_tensors(KimiK3Config(**json.loads(model)))
    wrong = mismatches(Path(path), stored, specs, VISION_PREFIXES)
    if wrong or sum(meta.nbytes for meta in stored.values()) > SCANNED_BYTES:
        return wrong
    return _not_finite(path)


def _not_finite(path: str) -> list[str]:
    """Reads every value, in a process of its own: the control side imports no torch."""
    command = [sys.executable, "-m", "workloads.loading.checkpoint", path]
    done = subprocess.run(command, cwd=checkout(), capture_output=True, text=True, timeout=SCAN_TIMEOUT_S)
    if done.returncode not in (0, 1):
        return [f"{path} could not be read: {done.stderr.strip().splitlines()[-1]}"]
    return done.stdout.splitlines()
