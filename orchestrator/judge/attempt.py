"""Where the records of one attempt lie, and in which order its observations were taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from collectors.records import rank_file
from orchestrator.judge.records import Reader

BASE = (
    "base/"  # `base/updated` in a check: the base arm's observation, which the candidate's is compared with
)
CRASH = "crash.json"  # in the base arm's folder: how it died, when a rank of it did
REFERENCE = "reference.json"  # of a reference's folder: which observation in it is the fresh start, and of what attempt
AGAIN = (
    "again"  # observation of an arm's second run, which only measures speed, and the end of its folder's name
)
#: Engines that report no lifecycle events, so that their ranks write no such file.
WITHOUT_LIFECYCLE = {"vllm"}
PER_RANK = {"tensors", "memory"}  # collectors of which every rank writes a file; of the others, rank 0


@dataclass(frozen=True)
class Moment:
    """One observation. checkpoint: entry that was loaded last, previous: the one before it ("" for none).
    load: number of that load, from 0. via: how it arrived. before: the last observation that still saw
    `previous`, None when there was none."""

    name: str
    checkpoint: str
    previous: str
    load: int
    via: str
    before: str | None
    collect: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """One version of the code, and the folder of its gang."""

    name: str
    folder: Path
    references: Mapping[str, Path]  # `fresh.new` -> folder of the observation that is the reference
    base: Path | None = None  # folder of the base arm's gang, which the candidate may be compared with

    @property
    def again(self) -> Path:
        """Folder of the second run's observation; not there where only one arm runs."""
        return again_folder(self.folder) / AGAIN

    def observation(self, name: str) -> Path | None:
        """Folder of an observation, of a reference, or of the base's observation (`base/updated`); None for what
        the attempt does not have."""
        if name.startswith("fresh."):
            return self.references.get(name)
        if name.startswith(BASE):
            return self.base / name.removeprefix(BASE) if self.base else None
        return self.folder / name


@dataclass(frozen=True)
class Attempt:
    """A frozen cell and everything that was recorded for it."""

    cell: Mapping[str, Any]
    folder: Path
    arms: Sequence[Arm]
    moments: Mapping[str, Moment]

    @property
    def ranks(self) -> int:
        layout = self.cell["parallelism"]
        return int(layout["tp"]) * int(layout["dp"]) * int(layout.get("pp", 1))

    @property
    def is_proxy(self) -> bool:
        """Whether the weights are random, so that answers mean nothing."""
        generated = any(c["path"] is None for c in self.cell["checkpoints"].values())
        return generated or self.cell["model"]["size"] == "proxy"

    @property
    def compared_references(self) -> set[str]:
        """References whose tensors a check compares with; only those recorded any."""
        return {side for side in self._compared if side.startswith("fresh.")}

    @property
    def compared_with_base(self) -> set[str]:
        """Observations of the base, as `base/NAME`, whose tensors a check of the candidate compares with."""
        return {side for side in self._compared if side.startswith(BASE)}

    @property
    def _compared(self) -> set[str]:
        checks = [check for check in self.cell["load_path"]["checks"] if check["rule"] == "equal"]
        return {check[side] for check in checks for side in ("left", "right")}

    def has_built(self, reference: Path) -> bool:
        """Whether a reference had a gang of its own, in this attempt."""
        own = f"{self.folder.parent.name}/{self.folder.name}"
        return (reference / "gang.json").exists() and _origin(reference).get("attempt") == own

    def checks(self, arm: Arm) -> list[Mapping[str, Any]]:
        """What is asked of an arm: of the base, nothing that compares with the base."""
        asked = self.cell["load_path"]["checks"]
        if arm.name == "candidate":
            return list(asked)
        return [c for c in asked if not c["left"].startswith(BASE) and not c["right"].startswith(BASE)]

    def with_collector(self, collector: str) -> list[str]:
        return [m.name for m in self.moments.values() if collector in m.collect]


def again_folder(arm: Path) -> Path:
    """Of an arm's second gang, beside that of its first."""
    return arm.with_name(f"{arm.name}.{AGAIN}")


def open_attempt(cell: Mapping[str, Any], folder: Path, references: Mapping[str, Path]) -> Attempt:
    """references: gang folders, `fresh.new` for the candidate; `base/fresh.new` for the same of the base arm."""
    base = folder / "base" if cell["code"].get("base") else None
    arms = [Arm("candidate", folder / "candidate", _of_arm(references, "candidate"), base)]
    if base is not None and not (base / CRASH).exists():
        arms.append(Arm("base", base, _of_arm(references, "base")))
    return Attempt(cell, folder, arms, timeline(cell["load_path"]["steps"]))


def _of_arm(references: Mapping[str, Path], arm: str) -> dict[str, Path]:
    own = {name: path for name, path in references.items() if "/" not in name and arm == "candidate"}
    prefix = f"{arm}/"
    own |= {n.removeprefix(prefix): p for n, p in references.items() if n.startswith(prefix)}
    return {name: path / _observed(path) for name, path in own.items()}


def _observed(reference: Path) -> str:
    """Name of the observation that is the reference: `fresh` of a gang of its own, or a scenario's after its start."""
    return str(_origin(reference).get("observation", "fresh"))


def _origin(reference: Path) -> Mapping[str, Any]:
    """Which observation of which attempt a reference is; empty of one that an earlier version of this project left."""
    try:
        return dict(orjson.loads((reference / REFERENCE).read_bytes()))
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}


def is_load(step: Mapping[str, Any]) -> bool:
    """Whether a step brings weights: an update that must be refused brings none."""
    return step["do"] in ("start", "update") and not step.get("refused", False)


def timeline(steps: Sequence[Mapping[str, Any]]) -> dict[str, Moment]:
    """Observations of a scenario by name, in order. Updates of one root after another to the same checkpoint, with no
    observation between them, replace what was there before the first."""
    moments: dict[str, Moment] = {}
    load, checkpoint, previous, via = -1, "", "", ""
    before: str | None = None
    latest: str | None = None
    for step in steps:
        if is_load(step):
            load, via = load + 1, step["via"]
            if latest is not None or not (step.get("roots") and step["checkpoint"] == checkpoint):
                previous, before, latest = checkpoint, latest, None
            checkpoint = step["checkpoint"]
        elif step["do"] == "observe":
            latest = step["name"]
            moments[latest] = Moment(latest, checkpoint, previous, load, via, before, tuple(step["collect"]))
    return moments


def check_files(attempt: Attempt, arm: Arm, reader: Reader) -> None:
    """Reports files that the layout and the scenario demand and that are not there, and unfinished steps."""
    for moment in attempt.moments.values():
        for collector in moment.collect:
            folder = arm.folder / moment.name
            if collector in PER_RANK:
                reader.ranks(folder, collector, attempt.ranks)
            else:
                reader.records(folder / f"{collector}.jsonl", 0)
    for name, folder in arm.references.items():
        if name in attempt.compared_references:
            reader.ranks(folder, "tensors", attempt.ranks)
    if attempt.cell["backend"]["engine"] not in WITHOUT_LIFECYCLE:
        reader.ranks(arm.folder, "lifecycle", attempt.ranks)
    _check_progress(attempt, arm, reader)


def _check_progress(attempt: Attempt, arm: Arm, reader: Reader) -> None:
    """Every rank must have ended every step, on the very steps that the cell froze."""
    steps = attempt.cell["load_path"]["steps"]
    for rank in range(attempt.ranks):
        path = rank_file(arm.folder, "progress", rank)
        records = [r for r in reader.records(path, rank) if r["kind"] == "step"]
        ended = {r["index"]: r for r in records if r["state"] == "end"}
        for index, step in enumerate(steps):
            name = step["name"] or step["checkpoint"]
            got = ended.get(index)
            if got is None:
                text = f"rank {rank} never ended step {index} ({step['do']} {name})."
                reader.report("unfinished", path, rank, text)
                break
            if (got["do"], got["name"]) != (step["do"], name):
                text = f"step {index} was {got['do']} {got['name']}, the cell says {step['do']} {name}."
                reader.report("other_run", path, rank, text)
                break
