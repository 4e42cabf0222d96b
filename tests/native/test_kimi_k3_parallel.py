"""Data-parallel ranks of Kimi-K3 that end at different times."""

from pathlib import Path
from typing import Any

from forked_ranks import RanksRunner
from k3_engine import OLD, evidence, generate, make_spec, prompts, start_engine

from workloads.engines.native import NativeEngine
from workloads.spec import Parallelism, Sampling


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
