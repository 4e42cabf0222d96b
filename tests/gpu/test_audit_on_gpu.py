"""An audit of tensors on a GPU finds what one of the same tensors on the CPU finds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectors.tensors import TensorAuditor
from workloads.engines.protocol import Part, Rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERTS, ROWS, COLUMNS = 6, 300, 1024


class Checkpoint:
    """Experts and their scales, on the CPU as a reader gives them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            f"experts.{i}.weight_packed": torch.randint(0, 256, (ROWS, COLUMNS), generator=generator).to(
                torch.uint8
            )
            for i in range(EXPERTS)
        }

    def slice(self, name: str, region: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return self.tensors[name][tuple(slice(start, start + length) for start, length in region)]


class Engine:
    """Fused experts padded by four rows, a transposed derived copy, NaN in one buffer and zeros in another."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        stacked = torch.stack(list(checkpoint.tensors.values()))
        self.model = nn.Module()
        self.fused = torch.zeros(EXPERTS, ROWS + 4, COLUMNS, dtype=torch.uint8)
        self.fused[:, :ROWS] = stacked
        self.fused = self.fused.to(device)
        self.model.register_buffer("fused", self.fused)
        self.model.derived = {"transposed": self.fused[0].t(), "table": [torch.arange(5000).to(device)]}
        self.model.register_buffer("poisoned", torch.full((70_000,), float("nan")).to(device))
        self.model.register_buffer("zeros", torch.zeros(9, 9, 9, dtype=torch.bfloat16).to(device))

    def roots(self) -> dict[str, nn.Module]:
        return {"target": self.model}

    def parts(self, root: str) -> list[Part]:
        matrix = ((0, ROWS), (0, COLUMNS))
        experts = [
            Part("target:fused", f"experts.{i}", self.fused[i, :ROWS], f"experts.{i}.weight_packed", matrix)
            for i in range(EXPERTS)
        ]
        return [*experts, Part("target:fused", "padding", self.fused[:, ROWS:], padding_value=0.0)]

    def rules(self) -> list[Rule]:
        return [Rule("target:*", "weight", "all that there is")]

    def runtime_tensors(self) -> dict[str, torch.Tensor]:
        return {}


def observe(folder: Path, device: str) -> list[dict[str, Any]]:
    checkpoint = Checkpoint()
    TensorAuditor(Engine(checkpoint, device)).observe(folder, 0, "fresh", checkpoint)
    records = [json.loads(line) for line in (folder / "tensors-00000.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in ("storage", "pid")} for record in records
    ]


def test_the_records_are_the_cpus(tmp_path: Path) -> None:
    records = observe(tmp_path / "gpu", "cuda")
    assert records == observe(tmp_path / "cpu", "cpu")
    found = {record["path"]: record for record in records if record["kind"] == "tensor"}
    assert (found["target:poisoned"]["nan"], found["target:zeros"]["const"]) == (True, 0)
    assert len(found["target:fused"]["slices"]) == EXPERTS
    parts = [record for record in records if record["kind"] == "part" and record["source"]]
    assert len(parts) == EXPERTS
    assert all(record["fp"] == record["expected"] for record in parts)
