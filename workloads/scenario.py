"""Plays the ordered steps of a load path on one process of a gang; each step is timed and recorded."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collectors.generations import gather_generations, read_prompts
from collectors.kernels import ServesExperts, gather_kernels
from collectors.records import RecordWriter, rank_file
from collectors.throughput import gather_throughput
from workloads.engines.protocol import Engine, Observer, Prompt, UpdateStats
from workloads.loading.shards import CheckpointError
from workloads.spec import GangSpec, Sampling, Step

log = logging.getLogger(__name__)

TRACED = Prompt("traced", (1, 2, 3, 4))  # of the forward passes whose storages the audit must reach


def play(
    engine: Engine, observer: Observer, spec: GangSpec, rank: int, progress: Sequence[RecordWriter]
) -> None:
    """Runs all steps of `spec` in order. Every step leaves two `step` records {"index", "do", "via", "name",
    "state", "time"} in `progress`; the second one also has "seconds", for loads "stats" (seconds by phase, bytes), and
    for observations "collectors" (seconds by name).

    progress: one writer for each rank that this process leads; `rank` is the first of them.
    """
    player = _Player(engine, observer, spec, rank)
    traced = not spec.trace
    for index, step in enumerate(spec.steps):
        record = {"index": index, "do": step.do, "via": step.via, "name": step.name or step.checkpoint}
        _note(progress, {**record, "state": "start", "time": time.time()})
        started = time.perf_counter()
        stats = player.play(step)
        record |= {"seconds": time.perf_counter() - started, "stats": asdict(stats) if stats else None}
        if step.do == "observe":
            record["collectors"] = player.seconds
        _note(progress, {**record, "state": "end", "time": time.time()})
        if step.do == "observe" and not traced:
            player.trace()
            traced = True


def _note(progress: Sequence[RecordWriter], record: dict[str, Any]) -> None:
    for writer in progress:
        writer.write("step", record)
        writer.sync()


class _Player:
    """Remembers between steps which checkpoint the engine should hold. seconds: of each collector of the last
    observation."""

    def __init__(self, engine: Engine, observer: Observer, spec: GangSpec, rank: int) -> None:
        self.engine, self.observer, self.spec, self.rank = engine, observer, spec, rank
        self.loaded = ""
        self.seconds: dict[str, float] = {}

    def trace(self) -> None:
        """One prefill and one decode under the auditor's eyes. Only after the first observation: a load is
        audited before anything runs on it, since a forward may complete what the load did not."""
        with self.observer.tracing():
            self.engine.generate([TRACED], Sampling(max_new_tokens=2, top_logprobs=1))

    def play(self, step: Step) -> UpdateStats | None:
        match step.do:
            case "start":
                self.loaded = step.checkpoint
                return self.engine.start(step.checkpoint, step.via)
            case "update":
                if step.refused:
                    self._refused(step)
                    return None
                self.loaded = step.checkpoint
                return self.engine.update(step.checkpoint, step.via, step.arrival)
            case "save":
                self.engine.save(step.checkpoint, step.via)
                return None
            case "sleep":
                self.engine.sleep(step.level)
                return None
            case "wake":
                self.engine.wake()
                return None
            case "observe":
                self.seconds = {collector: self._timed(collector, step.name) for collector in step.collect}
                if isinstance(self.engine, ServesExperts):  # last, since requests are counted, too
                    path = rank_file(Path(self.spec.output) / step.name, "kernels", self.rank)
                    gather_kernels(self.engine, path, self.rank)
                return None
        raise ValueError(f"Step do={step.do!r} is not one of start, update, sleep, wake, save, observe.")

    def _refused(self, step: Step) -> None:
        """An update that must be refused before anything is touched; what was loaded before stays."""
        try:
            self.engine.update(step.checkpoint, step.via, step.arrival)
        except CheckpointError as error:
            log.info("refused as it must be: %s", error)
            return
        raise RuntimeError(
            f"The update to {step.checkpoint!r} via {step.via} with {step.arrival} was taken, but the scenario says "
            "that it must be refused: the engine lets through what it cannot load as a whole."
        )

    def _timed(self, collector: str, observation: str) -> float:
        started = time.perf_counter()
        self._collect(collector, observation)
        return time.perf_counter() - started

    def _collect(self, collector: str, observation: str) -> None:
        engine, spec = self.engine, self.spec
        folder = Path(spec.output) / observation
        match collector:
            case "tensors":
                self.observer.tensors(observation, self.loaded)
            case "memory":
                self.observer.memory(observation)
            case "generations" | "gsm8k":
                prompts = read_prompts(Path(spec.prompts[collector]), engine)
                path = folder / f"{collector}.jsonl"
                gather_generations(engine, prompts, spec.sampling[collector], path, self.rank)
            case "throughput":
                gather_throughput(engine, spec.throughput, folder / "throughput.jsonl", self.rank)
            case _:
                raise ValueError(
                    f"Observation {observation!r} asks for collector {collector!r}, which is not one of "
                    "tensors, generations, gsm8k, throughput, memory."
                )
