"""Where the records of one attempt lie, and in which order its observations were taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectors.records import rank_file
from orchestrator.judge.records import Reader

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
    references: Mapping[str, Path]  # `fresh.new` -> gang folder whose observation `fresh` is the reference

    def observation(self, name: str) -> Path | None:
        """Folder of an observation or of a reference; None for a reference that is not there."""
        if name.startswith("fresh."):
            gang = self.references.get(name)
            return gang / "fresh" if gang else None
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
        return int(self.cell["parallelism"]["tp"]) * int(self.cell["parallelism"]["dp"])

    @property
    def is_proxy(self) -> bool:
        """Whether the weights are random, so that answers mean nothing."""
        generated = any(c["path"] is None for c in self.cell["checkpoints"].values())
        return generated or self.cell["model"]["size"] == "proxy"

    @property
    def compared_references(self) -> set[str]:
        """References whose tensors a check compares with; only those recorded any."""
        sides = {
            c[side]
            for c in self.cell["load_path"]["checks"]
            if c["rule"] == "equal"
            for side in ("left", "right")
        }
        return {side for side in sides if side.startswith("fresh.")}

    def with_collector(self, collector: str) -> list[str]:
        return [m.name for m in self.moments.values() if collector in m.collect]


def open_attempt(cell: Mapping[str, Any], folder: Path, references: Mapping[str, Path]) -> Attempt:
    """references: `fresh.new` for the candidate; `base/fresh.new` for the same of the base arm."""
    arms = [Arm("candidate", folder / "candidate", _of_arm(references, "candidate"))]
    if cell["code"].get("base"):
        arms.append(Arm("base", folder / "base", _of_arm(references, "base")))
    return Attempt(cell, folder, arms, timeline(cell["load_path"]["steps"]))


def _of_arm(references: Mapping[str, Path], arm: str) -> dict[str, Path]:
    own = {name: path for name, path in references.items() if "/" not in name and arm == "candidate"}
    prefix = f"{arm}/"
    return own | {n.removeprefix(prefix): p for n, p in references.items() if n.startswith(prefix)}


def timeline(steps: Sequence[Mapping[str, Any]]) -> dict[str, Moment]:
    """Observations of a scenario by name, in order."""
    moments: dict[str, Moment] = {}
    load, checkpoint, previous, via = -1, "", "", ""
    before: str | None = None
    latest: str | None = None
    for step in steps:
        if step["do"] in ("start", "update"):
            load, previous, checkpoint, via = load + 1, checkpoint, step["checkpoint"], step["via"]
            before, latest = latest, None
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
    for name, gang in arm.references.items():
        if name in attempt.compared_references:
            reader.ranks(gang / "fresh", "tensors", attempt.ranks)
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
