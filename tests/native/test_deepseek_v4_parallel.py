"""However DeepSeek-V4 is divided over ranks, it says the same, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from deepseek_v4_engine import make_checkpoint, make_spec, start_engine
from forked_ranks import RanksRunner
from k3_engine import NEW, OLD, generate, prompts

from workloads.engines.native import NativeEngine
from workloads.spec import Parallelism

GIVEN = prompts(1, 30, 6)
NEW_TOKENS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[Any, ...]]:
    return generate(start_engine(checkpoint), GIVEN, NEW_TOKENS)


@pytest.mark.parametrize(
    "parallelism",
    [Parallelism(tp=2, dp=1, ep=1), Parallelism(tp=2, dp=2, ep=4), Parallelism(tp=1, dp=4, ep=4)],
    ids=lambda p: f"tp{p.tp}-dp{p.dp}-ep{p.ep}",
)
def test_ranks_together_equal_one(
    parallelism: Parallelism, checkpoint: Path, expected: list[tuple[Any, ...]], run_ranks: RanksRunner
) -> None:
    spec = make_spec(checkpoint, parallelism, max_requests=8)

    def serve(rank: int) -> list[tuple[Any, ...]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        return generate(engine, GIVEN, NEW_TOKENS)

    results = run_ranks(parallelism.ranks, serve)
    assert results[0] == expected
    assert not any(results[1:])


def test_an_update_of_two_ranks_equals_a_start(checkpoint: Path, run_ranks: RanksRunner) -> None:
    spec = make_spec(checkpoint, Parallelism(tp=2, dp=1, ep=2), max_requests=8)

    def serve(rank: int) -> list[list[tuple[Any, ...]]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        said = []
        for via in ("layerwise", "direct"):
            engine.update(NEW, via)
            said.append(generate(engine, GIVEN, NEW_TOKENS))
            engine.update(OLD, via)
        return said

    updated = generate(start_engine(checkpoint, NEW), GIVEN, NEW_TOKENS)
    assert run_ranks(2, serve)[0] == [updated, updated]
