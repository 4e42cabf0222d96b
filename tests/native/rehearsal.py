"""Plays one short scenario of the native engine in this process, on one rank, and judges it as the driver would."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from family_engine import family
from k3_engine import NEW, OLD

from collectors.generations import gather_generations
from collectors.records import RecordWriter, rank_file
from orchestrator.judge.attempt import REFERENCE
from orchestrator.judge.policy import judge_attempt
from orchestrator.store import write_json
from workloads import faults
from workloads.engines.protocol import Prompt
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.observer import RankObserver
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Sampling, Step

CONFIG = KimiK3Config(
    num_layers=2,
    full_attention_layers=[1],
    hidden_size=64,
    vocab_size=320,
    num_experts=2,
    num_experts_per_token=2,
)
PROMPT = Prompt("p", (5, 9, 2, 7, 1))
CHECKPOINTS = {OLD: Checkpoint(), NEW: Checkpoint(perturbation="every_tensor")}
CRASH = "crash"

Json = dict[str, Any]


class Rehearsal:
    """Scenarios of one model whose checkpoint lies in `checkpoint`. References are made once for each set of faults.

    backend: where its engines run; of their limits, small ones are enough.
    """

    def __init__(
        self, folder: Path, checkpoint: Path, config: Any = CONFIG, backend: Backend | None = None
    ) -> None:
        torch.set_num_threads(1)
        self._folder, self._checkpoint = folder, checkpoint
        self._backend = replace(backend or Backend(), max_model_len=64, max_requests=2)
        self._model = Model("toy", family(config), **{family(config): config})
        self._count = 0
        self._references: dict[tuple[str, ...], dict[str, Path]] = {}

    def judge(self, steps: Sequence[Step], injected: Sequence[str] = ()) -> Json:
        """`result.json`; a scenario that breaks off has verdict ERROR and the finding `crash`."""
        self._count += 1
        attempt = self._folder / f"cell-{self._count}" / "attempt-001"
        try:
            references = self._made(tuple(injected))
            self._play(attempt / "candidate", steps, injected)
        except Exception as error:  # noqa: BLE001  # whatever the engine raises is how a crash shows
            return {
                "verdict": "ERROR",
                "findings": [{"code": CRASH, "detail": f"{type(error).__name__}: {error}"}],
            }
        return judge_attempt(self._cell(steps), attempt, references)

    def _made(self, injected: tuple[str, ...]) -> dict[str, Path]:
        """Fresh starts with the same faults."""
        if not any("safetensors" in faults.about(name).via for name in injected):
            injected = ()  # a fresh start is the same without them
        if injected not in self._references:
            made = {}
            for name in CHECKPOINTS:
                folder = self._folder / "references" / "-".join((name, *injected))
                self._play(folder, [Step("start", name, "safetensors"), observe("fresh")], injected)
                write_json(folder / REFERENCE, {"observation": "fresh", "attempt": ""})
                made[f"fresh.{name}"] = folder
            self._references[injected] = made
        return self._references[injected]

    def _play(self, folder: Path, steps: Sequence[Step], injected: Sequence[str]) -> None:
        spec = self._spec(folder, steps, injected)
        with (
            RecordWriter(rank_file(folder, "progress", 0)) as progress,
            RecordWriter(rank_file(folder, "lifecycle", 0)) as lifecycle,
        ):
            engine = faults.engine_class(injected)(spec, 0, lifecycle)
            observer, loaded = RankObserver(engine, spec, 0), ""
            for index, step in enumerate(steps):
                record = {
                    "index": index,
                    "do": step.do,
                    "via": step.via,
                    "name": step.name or step.checkpoint,
                }
                progress.write("step", {**record, "state": "start", "time": time.time()})
                loaded = step.checkpoint or loaded
                match step.do:
                    case "start":
                        engine.start(step.checkpoint, step.via)
                    case "update":
                        engine.update(step.checkpoint, step.via, step.arrival)
                    case "sleep":
                        engine.sleep(step.level)
                    case "wake":
                        engine.wake()
                    case "observe":
                        observer.tensors(step.name, loaded)
                        path = folder / step.name / "generations.jsonl"
                        gather_generations(engine, [PROMPT], Sampling(max_new_tokens=3), path, 0)
                end = {"state": "end", "time": time.time(), "seconds": 0.0, "stats": None}
                progress.write("step", {**record, **end})

    def _spec(self, folder: Path, steps: Sequence[Step], injected: Sequence[str]) -> GangSpec:
        return GangSpec(
            name="candidate",
            output=str(folder),
            model=self._model,
            parallelism=Parallelism(),
            backend=self._backend,
            checkpoints=CHECKPOINTS,
            checkpoint_dirs=dict.fromkeys(CHECKPOINTS, str(self._checkpoint)),
            steps=list(steps),
            faults=list(injected),
        )

    def _cell(self, steps: Sequence[Step]) -> Json:
        """What the judge reads of a frozen cell."""
        return {
            "labels": {},
            "model": {"name": "kimi_k3", "size": "proxy"},
            "parallelism": asdict(Parallelism()),
            "backend": {"engine": "native"},
            "load_path": {"steps": [asdict(step) for step in steps], "checks": list(_checks(steps))},
            "checkpoints": {name: asdict(checkpoint) for name, checkpoint in CHECKPOINTS.items()},
            "code": {"candidate": {}, "base": None},
            "collect": {"gsm8k": {"path": None}},
            "policy": {"coverage": 0.999},
        }


def observe(name: str) -> Step:
    return Step("observe", name=name, collect=["tensors", "generations"])


def observed(steps: Sequence[Step]) -> list[Step]:
    """With an observation after every load: engine states between which nothing else happened."""
    seen: list[Step] = []
    for step in steps:
        seen.append(step)
        if step.do in ("start", "update"):
            seen.append(observe(f"after_{sum(s.do == 'observe' for s in seen)}"))
    return seen


def _checks(steps: Sequence[Step]) -> Iterator[Json]:
    held, at = replace(steps[0]), ""
    for number, step in enumerate(steps):
        if step.do in ("start", "update"):
            held = step
        elif step.do == "observe" and held.via != "dummy":
            at = step.name
            yield _check(f"equal_{number}", "equal", at, f"fresh.{held.checkpoint}")
            yield _check(f"checkpoint_{number}", "checkpoint", at)
            yield _check(f"answers_{number}", "same_generations", at, f"fresh.{held.checkpoint}")
    if sum(step.do == "observe" for step in steps) > 1:
        yield _check("stable", "stable_storage")
    yield _check("lifecycle", "lifecycle")
    yield _check("coverage", "coverage")


def _check(name: str, rule: str, left: str = "", right: str = "") -> Json:
    return {"name": name, "rule": rule, "left": left, "right": right, "required": True}
