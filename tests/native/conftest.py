"""A generated proxy checkpoint for the whole session, and processes that stand for ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_ranks import ForkedRanks, RanksRunner

from workloads.loading.generate import generate_checkpoint
from workloads.models.kimi_k3.config import KimiK3Config


@pytest.fixture(scope="session")
def k3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the default proxy, seed 0."""
    torch.set_num_threads(1)
    return generate_checkpoint(KimiK3Config(), 0, tmp_path_factory.mktemp("kimi_k3") / "checkpoint")


@pytest.fixture
def run_ranks(tmp_path: Path) -> Iterator[RanksRunner]:
    """See `forked_ranks.ForkedRanks.run`."""
    ranks = ForkedRanks(tmp_path)
    yield ranks.run
    ranks.end()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels run in Triton's interpreter, on memory of the CPU."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles kernels here, and tests/gpu runs them: a process cannot do both")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
