"""Speed of the audit of an engine's weights beside a copy in memory and beside the checksum that vLLM has of its own.

Two threads, as in a vLLM worker on two cores. The checksum is written down here as that release computes it: SHA-256 of
every parameter's bytes, one after the other. Ratios of the best of several rounds; the machine may be busy.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from collectors.locate import locate
from collectors.tensors import TensorAuditor
from workloads.engines.protocol import Part, Rule

LAYERS, HIDDEN, INNER, VOCABULARY = 30, 576, 1536, 49152
ROUNDS = 12
NOISE = 0.75  # the audit passes its bars by a few per cent, and equal runs on a shared machine differ by more
CHECKSUM = "vLLM's checksum"


class Engine:
    """A dense model of 0.54 GB in float32, laid out as vLLM does it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        self._add(self.model, "embed", generator, VOCABULARY, HIDDEN)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer in self.model.layers:
            self._add(layer, "qkv", generator, 960, HIDDEN)
            self._add(layer, "o", generator, HIDDEN, HIDDEN)
            self._add(layer, "gate_up", generator, 2 * INNER, HIDDEN)
            self._add(layer, "down", generator, HIDDEN, INNER)
            self._add(layer, "norm", generator, HIDDEN)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())

    def _add(self, module: nn.Module, name: str, generator: torch.Generator, *shape: int) -> None:
        value = torch.randn(shape, generator=generator)
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def roots(self) -> dict[str, nn.Module]:
        return {"target": self.model}

    def parts(self, root: str) -> list[Part]:
        return []

    def rules(self) -> list[Rule]:
        return []

    def runtime_tensors(self) -> dict[str, torch.Tensor]:
        return {}


class Checkpoint:
    """The same weights."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def vllm_checksum(model: nn.Module) -> dict[str, str]:
    """The algorithm of vLLM 0.32.0's `compute_tensor_digests`."""
    return {
        name: hashlib.sha256(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def best_seconds(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """By the clock; the actions alternate, so that they meet the same neighbours."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(ROUNDS):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def test_an_audit_of_half_a_gigabyte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Engine()
        auditor, checkpoint = TensorAuditor(engine), Checkpoint(engine.model)
        sources = list(engine.model.parameters())
        targets = [torch.empty_like(source) for source in sources]
        names = iter(range(ROUNDS))
        seconds = best_seconds(
            {
                "memory copy": lambda: [t.copy_(s) for t, s in zip(targets, sources, strict=True)],
                "audit": lambda: auditor.observe(tmp_path / str(next(names)), 0, "fresh", checkpoint),  # type: ignore[arg-type]
                CHECKSUM: lambda: vllm_checksum(engine.model),
            }
        )
        start = time.perf_counter()
        location = locate([(name, p.detach()) for name, p in engine.model.named_parameters()], checkpoint, 1)
        seconds["locate, once per engine"] = time.perf_counter() - start
    finally:
        torch.set_num_threads(before)
    audit = seconds["audit"]
    with capsys.disabled():
        print(f"\n{engine.nbytes / 1e9:.2f} GB, two threads:")
        for name, value in seconds.items():
            print(f"  {name:24} {engine.nbytes / value / 1e9:6.2f} GB/s  {value * 1e3:7.1f} ms")
        print(
            f"  the audit: {seconds['memory copy'] / audit:.2f} of the speed of a copy (at least 0.5), "
            f"{seconds[CHECKSUM] / audit:.1f} times the checksum's (at least 5)"
        )
    assert location.reasons == {}
    assert audit * NOISE <= 2 * seconds["memory copy"]
    assert 5 * audit * NOISE <= seconds[CHECKSUM]
