"""Plays the ordered steps of a load path on one rank: start, update, observe; each is timed and recorded."""

import functools
import time
from dataclasses import asdict
from pathlib import Path

from collectors.generations import gather_generations, read_prompts
from collectors.memory import gather_memory
from collectors.records import RecordWriter, rank_file
from collectors.tensors import TensorAuditor
from collectors.throughput import gather_throughput
from workloads.engines.protocol import Engine, Prompt, UpdateStats
from workloads.loading.perturb import open_view
from workloads.spec import GangSpec, Sampling, Step

TRACED = Prompt("traced", (1, 2, 3, 4))  # of the forward passes whose storages the audit must reach


def play(engine: Engine, spec: GangSpec, rank: int, progress: RecordWriter) -> None:
    """Runs all steps of `spec` in order. Every step leaves two `step` records {"index", "do", "name", "state",
    "time"} in `progress`; the second one also has "seconds" and, for loads, "stats" (seconds by phase, bytes)."""
    player = _Player(engine, spec, rank)
    for index, step in enumerate(spec.steps):
        record = {"index": index, "do": step.do, "name": step.name or step.checkpoint}
        progress.write("step", {**record, "state": "start", "time": time.time()})
        progress.sync()
        started = time.perf_counter()
        stats = player.play(step)
        record |= {"seconds": time.perf_counter() - started, "stats": asdict(stats) if stats else None}
        progress.write("step", {**record, "state": "end", "time": time.time()})
        progress.sync()
        if step.do == "start" and spec.trace:
            player.trace()


class _Player:
    """Remembers between steps which checkpoint the engine should hold, and what the auditor saw before."""

    def __init__(self, engine: Engine, spec: GangSpec, rank: int) -> None:
        self.engine, self.spec, self.rank = engine, spec, rank
        self.auditor = TensorAuditor(engine)
        self.loaded = ""
        self._reader = functools.cache(
            lambda name: open_view(spec.checkpoints[name], spec.checkpoint_dirs[name])
        )

    def trace(self) -> None:
        """One prefill and one decode under the auditor's eyes. Only after the start: what an update leaves is
        audited before anything runs on it, since a forward may complete what the update did not."""
        with self.auditor.trace():
            self.engine.generate([TRACED], Sampling(max_new_tokens=2, top_logprobs=1))

    def play(self, step: Step) -> UpdateStats | None:
        match step.do:
            case "start":
                self.loaded = step.checkpoint
                return self.engine.start(step.checkpoint, step.via)
            case "update":
                self.loaded = step.checkpoint
                return self.engine.update(step.checkpoint, step.via)
            case "observe":
                for collector in step.collect:
                    self._collect(collector, step.name)
                return None
        raise ValueError(f"Step do={step.do!r} is not one of start, update, observe.")

    def _collect(self, collector: str, observation: str) -> None:
        engine, spec, rank = self.engine, self.spec, self.rank
        folder = Path(spec.output) / observation
        match collector:
            case "tensors":
                self.auditor.observe(folder, rank, observation, self._reader(self.loaded))
            case "generations" | "gsm8k":
                prompts = read_prompts(Path(spec.prompts[collector]), engine)
                path = folder / f"{collector}.jsonl"
                gather_generations(engine, prompts, spec.sampling[collector], path, rank)
            case "throughput":
                gather_throughput(engine, spec.throughput, folder / "throughput.jsonl", rank)
            case "memory":
                gather_memory(engine, rank_file(folder, "memory", rank), rank)
            case _:
                raise ValueError(
                    f"Observation {observation!r} asks for collector {collector!r}, which is not one of "
                    "tensors, generations, gsm8k, throughput, memory."
                )
