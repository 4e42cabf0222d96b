"""Experts of Qwen3 dealt out in pairs, and at the published width over four ranks."""

from typing import Any

import pytest
from forked_ranks import RanksRunner
from k3_engine import generate, prompts
from qwen3_engine import OLD, WIDE, checkpoint, qwen3_spec, start_qwen3

from workloads.engines.native import NativeEngine
from workloads.spec import Parallelism

GIVEN = prompts(1, 13, 6)
NEW_TOKENS = 3
EXPERT_PARALLEL = [Parallelism(tp=2, ep=2), Parallelism(dp=2, ep=2)]


def layout(p: Parallelism) -> str:
    return f"tp{p.tp}-dp{p.dp}-ep{p.ep}"


def said_by_ranks(name: str, parallelism: Parallelism, run_ranks: RanksRunner) -> list[list[tuple[Any, ...]]]:
    checkpoint(name)  # before the ranks are forked
    spec = qwen3_spec(name, parallelism)

    def serve(rank: int) -> list[tuple[Any, ...]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        return generate(engine, GIVEN, NEW_TOKENS)

    return run_ranks(parallelism.ranks, serve)


@pytest.mark.parametrize("parallelism", EXPERT_PARALLEL, ids=layout)
def test_experts_dealt_out_in_pairs_equal_one(parallelism: Parallelism, run_ranks: RanksRunner) -> None:
    """Data-parallel ranks have different numbers of tokens, and one has none at times."""
    results = said_by_ranks("moe_nvfp4", parallelism, run_ranks)
    assert results[0] == generate(start_qwen3("moe_nvfp4"), GIVEN, NEW_TOKENS)


@pytest.mark.parametrize("name", list(WIDE))
def test_four_ranks_share_experts_of_the_published_width(name: str, run_ranks: RanksRunner) -> None:
    """192 channels each, padded to 256 in BF16; of six FP8 tiles two, two, one and one."""
    results = said_by_ranks(name, Parallelism(tp=4), run_ranks)
    assert results[0] == generate(start_qwen3(name), GIVEN, NEW_TOKENS)
