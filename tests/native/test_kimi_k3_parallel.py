"""However a model is divided over ranks, it says the same, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import RanksRunner
from k3_engine import NEW, OLD, evidence, generate, make_spec, prompts, start_engine

from workloads.engines.native import NativeEngine
from workloads.spec import Parallelism, Sampling

GIVEN = prompts(1, 30, 6)  # of sixteen ranks, one data-parallel group has nothing to do
NEW_TOKENS = 4


@pytest.fixture(scope="module")
def expected(k3_checkpoint: Path) -> list[tuple[Any, ...]]:
    return generate(start_engine(k3_checkpoint), GIVEN, NEW_TOKENS)


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(tp=2, dp=1, ep=2),
        Parallelism(tp=2, dp=1, ep=1),
        Parallelism(tp=1, dp=2, ep=2),
        Parallelism(tp=2, dp=2, ep=2),
        Parallelism(tp=4, dp=4, ep=16, nodes=4, gpus_per_node=4),
    ],
    ids=lambda p: f"tp{p.tp}-dp{p.dp}-ep{p.ep}",
)
def test_ranks_together_equal_one(
    parallelism: Parallelism, k3_checkpoint: Path, expected: list[tuple[Any, ...]], run_ranks: RanksRunner
) -> None:
    spec = make_spec(k3_checkpoint, parallelism)

    def serve(rank: int) -> list[tuple[Any, ...]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        return generate(engine, GIVEN, NEW_TOKENS)

    results = run_ranks(parallelism.ranks, serve)
    assert results[0] == expected
    assert not any(results[1:])


def test_ranks_that_stop_early_wait_for_the_others(k3_checkpoint: Path, run_ranks: RanksRunner) -> None:
    """The first group's requests end at once; the second goes on, and later calls still line up."""
    spec = make_spec(k3_checkpoint, Parallelism(tp=1, dp=2, ep=2))
    alone = start_engine(k3_checkpoint)
    given = prompts(4, 5)
    first = generate(alone, given, 1)[0][2][0]
    alone.tokenizer.eos_ids = frozenset({first})

    def serve(rank: int) -> list[tuple[Any, ...]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        engine.tokenizer.eos_ids = frozenset({first})
        twice = [engine.generate(given, Sampling(max_new_tokens=20)) for _ in range(2)]
        return [evidence(generations) for generations in twice]

    once = evidence(alone.generate(given, Sampling(max_new_tokens=20)))
    assert once[0][-1] == "stop"
    assert run_ranks(2, serve)[0] == [once, once]


def test_an_update_of_two_ranks_equals_a_start(k3_checkpoint: Path, run_ranks: RanksRunner) -> None:
    spec = make_spec(k3_checkpoint, Parallelism(tp=2, dp=1, ep=2))

    def serve(rank: int) -> list[list[tuple[Any, ...]]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        said = []
        for via in ("layerwise", "direct"):
            engine.update(NEW, via)
            said.append(generate(engine, GIVEN, NEW_TOKENS))
            engine.update(OLD, via)
        return said

    updated = generate(start_engine(k3_checkpoint, NEW), GIVEN, NEW_TOKENS)
    assert run_ranks(2, serve)[0] == [updated, updated]
