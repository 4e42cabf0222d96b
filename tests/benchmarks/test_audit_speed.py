"""Speed of a whole audit of many small tensors, beside what the plainest possible loop over them costs."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectors.tensors import TensorAuditor

torch.set_num_threads(1)

MODULES, EACH, NBYTES = 1000, 100, 4096
COUNT = MODULES * EACH


class Engine:
    """100,000 parameters of 4 KiB and nothing else."""

    def __init__(self) -> None:
        values = torch.randint(-(1 << 62), 1 << 62, (COUNT, NBYTES // 8)).view(torch.bfloat16)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(MODULES))
        for i, value in enumerate(values):
            parameter = nn.Parameter(value.clone(), requires_grad=False)
            self.model.layers[i // EACH].register_parameter(f"w{i % EACH}", parameter)

    def roots(self) -> dict[str, nn.Module]:
        return {"target": self.model}

    def parts(self, root: str) -> list[Any]:
        return []

    def rules(self) -> list[Any]:
        return []

    def runtime_tensors(self) -> dict[str, torch.Tensor]:
        return {}


class NoCheckpoint:
    """There are no parts, so nothing is read."""


def plain_loop(engine: Engine, path: Path) -> None:
    """SHA-256 and a JSON line for every parameter: no walk, no aliases, no NaN, no classes."""
    with path.open("w") as file:
        for name, parameter in engine.model.named_parameters():
            digest = hashlib.sha256(parameter.view(torch.uint8).numpy()).hexdigest()
            record = {
                "path": name,
                "dtype": str(parameter.dtype),
                "shape": list(parameter.shape),
                "stride": list(parameter.stride()),
                "storage": parameter.untyped_storage().data_ptr(),
                "fp": digest,
            }
            file.write(json.dumps(record) + "\n")


def test_many_small_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    auditor = TensorAuditor(engine)
    seconds: dict[str, list[float]] = {"audit": [], "plain loop": []}
    wall = []
    for i in range(2):
        start, clock = time.process_time(), time.perf_counter()
        auditor.observe(tmp_path / str(i), 0, str(i), NoCheckpoint())
        seconds["audit"].append(time.process_time() - start)
        wall.append(time.perf_counter() - clock)
        start = time.process_time()
        plain_loop(engine, tmp_path / "plain.jsonl")
        seconds["plain loop"].append(time.process_time() - start)
    audit, plain = min(seconds["audit"]), min(seconds["plain loop"])
    with capsys.disabled():
        print(
            f"\n{COUNT:,} tensors of {NBYTES} bytes, one core: audit {audit:.2f} s of processor time", end=" "
        )
        print(
            f"({min(wall):.2f} s by the clock), plain loop with SHA-256 {plain:.2f} s: {audit / plain:.2f} x"
        )
    lines = (tmp_path / "0" / "tensors-00000.jsonl").read_text().count('"kind":"tensor"')
    assert lines == COUNT
    assert audit <= 4 * plain
