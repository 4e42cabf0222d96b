"""What the ranks of all pipeline stages hold of a checkpoint together.

Each rank says which slices it declares and is held against those; a layer that no stage declares is missed by none.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import orjson

from orchestrator.judge.boxes import Box, union_volume
from orchestrator.judge.records import Audit
from workloads.loading.tensor_table import TensorSpec, every_tensor
from workloads.models.architectures import ARCHITECTURES, tensor_table


class Holdings:
    """Of one observation. cell: of an engine whose models are divided into stages."""

    def __init__(self, cell: Mapping[str, Any]) -> None:
        model = cell["model"]
        self._tensors = _tensors(model["architecture"], orjson.dumps(model[model["architecture"]]))
        self._boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {}

    @classmethod
    def of(cls, cell: Mapping[str, Any]) -> "Holdings | None":
        """None where every rank holds a share of all layers, or the engine is a foreign one."""
        divided = cell["parallelism"].get("pp", 1) > 1 and cell["model"]["architecture"] in ARCHITECTURES
        return cls(cell) if divided else None

    def add(self, audit: Audit) -> None:
        for parts in audit.parts.values():
            for part in parts.values():
                if part["source"] is not None and part["fp"] is not None:
                    box = tuple((start, length) for start, length in part["region"])
                    self._boxes.setdefault(part["source"], set()).add(box)

    def lacking(self) -> Iterator[tuple[str, int, int]]:
        """(name, bytes that no rank holds, bytes) of each tensor that is not held whole."""
        for name, spec in self._tensors.items():
            shape = list(spec.shape)
            if spec.read is not None:
                shape[0] = spec.read
            boxes: list[Box] = list(self._boxes.get(name, ()))
            itemsize = spec.nbytes // prod(spec.shape)
            missing = prod(shape) - union_volume(boxes, shape)
            if missing:
                yield name, missing * itemsize, prod(shape) * itemsize


@lru_cache(maxsize=4)
def _tensors(architecture: str, dimensions: bytes) -> dict[str, TensorSpec]:
    config = ARCHITECTURES[architecture](**orjson.loads(dimensions))
    return {spec.name: spec for spec in every_tensor(tensor_table(architecture).sections(config))}
