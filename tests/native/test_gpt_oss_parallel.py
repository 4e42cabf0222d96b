"""However gpt-oss is divided over ranks, it says the same, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import RanksRunner
from gpt_oss_engine import TOY, make_spec, start_engine
from k3_engine import NEW, OLD, generate, prompts

from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.spec import Parallelism

GIVEN = prompts(1, 12, 6)  # of four data-parallel groups, one has nothing to do
NEW_TOKENS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(TOY, 0, tmp_path_factory.mktemp("gpt_oss") / "checkpoint")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[Any, ...]]:
    return generate(start_engine(checkpoint), GIVEN, NEW_TOKENS)


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(tp=2, dp=1, ep=1),
        Parallelism(tp=2, dp=1, ep=2),
        Parallelism(tp=2, dp=2, ep=1),
        Parallelism(tp=2, dp=2, ep=4),
        Parallelism(tp=2, dp=2, ep=2),
        Parallelism(tp=4, dp=1, ep=4),
        Parallelism(tp=1, dp=4, ep=4),
    ],
    ids=lambda p: f"tp{p.tp}-dp{p.dp}-ep{p.ep}",
)
def test_ranks_together_equal_one(
    parallelism: Parallelism, checkpoint: Path, expected: list[tuple[Any, ...]], run_ranks: RanksRunner
) -> None:
    spec = make_spec(checkpoint, parallelism=parallelism)

    def serve(rank: int) -> list[tuple[Any, ...]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        return generate(engine, GIVEN, NEW_TOKENS)

    results = run_ranks(parallelism.ranks, serve)
    assert results[0] == expected
    assert not any(results[1:])


@pytest.mark.parametrize("layout", ["combined", "quark"])
def test_an_update_of_ranks_that_share_experts_equals_a_start(
    layout: str, tmp_path: Path, run_ranks: RanksRunner
) -> None:
    config = replace(TOY, checkpoint_layout=layout)
    folder = generate_checkpoint(config, 0, tmp_path / "checkpoint")
    spec = make_spec(folder, config, Parallelism(tp=2, dp=1, ep=1))

    def serve(rank: int) -> list[list[tuple[Any, ...]]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        said = []
        for via in ("layerwise", "direct"):
            engine.update(NEW, via)
            said.append(generate(engine, GIVEN, NEW_TOKENS))
            engine.update(OLD, via)
        return said

    updated = generate(start_engine(folder, NEW, config=config), GIVEN, NEW_TOKENS)
    assert run_ranks(2, serve)[0] == [updated, updated]
