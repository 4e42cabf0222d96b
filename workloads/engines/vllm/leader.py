"""One process of a gang whose engine is vLLM: it leads the tensor-parallel workers of one replica."""

from contextlib import ExitStack
from pathlib import Path

from collectors.records import RecordWriter, rank_file
from workloads import scenario
from workloads.engines.vllm.adapter import VllmEngine
from workloads.spec import GangSpec


def lead(spec: GangSpec, rank: int) -> None:
    """Plays the scenario of the gang for `spec.ranks_per_member` ranks from `rank` on."""
    with ExitStack() as stack:
        progress = [
            stack.enter_context(RecordWriter(rank_file(Path(spec.output), "progress", led)))
            for led in range(rank, rank + spec.ranks_per_member)
        ]
        engine = VllmEngine(spec, rank)
        stack.callback(engine.stop)
        scenario.play(engine, engine.workers, spec, rank, progress)
