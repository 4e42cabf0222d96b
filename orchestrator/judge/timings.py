"""Reads what loads and requests cost: seconds by phase, memory, throughput."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collectors.records import rank_file
from orchestrator.judge.answers import Outcome, counterpart
from orchestrator.judge.attempt import BASE, Arm, Attempt
from orchestrator.judge.records import Reader, Record
from orchestrator.judge.statistics import spread

PHASES = ("read_s", "install_s", "post_process_s", "finish_s")


def progress(attempt: Attempt, folder: Path, reader: Reader) -> list[list[Record]]:
    """`step` records of every rank of the gang in `folder`."""
    files = (rank_file(folder, "progress", rank) for rank in range(attempt.ranks))
    return [[r for r in reader.records(path) if r["kind"] == "step"] for path in files]


def loads(attempt: Attempt, arm: Arm, steps: Sequence[Sequence[Record]]) -> list[dict[str, Any]]:
    """One entry a load: {arm, index, do, name, via, seconds, phases, nbytes}; the slowest rank counts,
    bytes are those of all ranks together."""
    found = []
    for index, step in enumerate(attempt.cell["load_path"]["steps"]):
        ended = [r for rank in steps for r in rank if r["index"] == index and r["state"] == "end"]
        stats = [r["stats"] for r in ended if r.get("stats")]
        if step["do"] not in ("start", "update") or not ended:
            continue
        found.append(
            {
                "arm": arm.name,
                "index": index,
                "do": step["do"],
                "name": step["checkpoint"],
                "via": step["via"],
                "seconds": max(r["seconds"] for r in ended),
                "phases": {phase: max((s[phase] for s in stats), default=0.0) for phase in PHASES},
                "nbytes": sum(s["nbytes"] for s in stats),
            }
        )
    return found


def audits(
    attempt: Attempt, arm: Arm, steps: Sequence[Sequence[Record]], reader: Reader
) -> list[dict[str, Any]]:
    """{arm, observation, seconds} of the slowest rank for each set of tensors that was gathered for this attempt:
    those of a reference, too, if its gang was one of this attempt."""
    found = _audits(arm, steps)
    first = attempt.arms[0]  # whose references the others may share
    told = [] if arm is first else list(first.references.values())
    for name, folder in arm.references.items():
        if folder not in told and attempt.has_built(folder.parent):
            found += _audits(arm, progress(attempt, folder.parent, reader), name)
    return found


def _audits(arm: Arm, steps: Sequence[Sequence[Record]], name: str = "") -> list[dict[str, Any]]:
    """name: of a reference, whose only observation it is."""
    slowest: dict[str, float] = {}
    for record in (record for rank in steps for record in rank):
        seconds = record.get("collectors", {}).get("tensors")  # of old attempts nobody knows
        if seconds is not None:
            observation = name or record["name"]
            slowest[observation] = max(seconds, slowest.get(observation, 0.0))
    return [{"arm": arm.name, "observation": n, "seconds": s} for n, s in slowest.items()]


def wall(steps: Sequence[Sequence[Record]]) -> tuple[float, float] | None:
    """Unix times of the first and last record, None without any."""
    times = [record["time"] for rank in steps for record in rank]
    return (min(times), max(times)) if times else None


def memory(attempt: Attempt, arm: Arm, reader: Reader) -> list[dict[str, Any]]:
    """Largest resident and peak bytes over the ranks, by observation."""
    found = []
    for name in attempt.with_collector("memory"):
        files = (rank_file(arm.folder / name, "memory", rank) for rank in range(attempt.ranks))
        records = [r for path in files for r in reader.records(path) if r["kind"] == "memory"]
        if records:
            peak, rss = (max(r[key] for r in records) for key in ("peak_rss", "rss"))
            found.append({"arm": arm.name, "observation": name, "rss": rss, "peak_rss": peak})
    return found


def throughput(attempt: Attempt, arm: Arm, check: Mapping[str, Any], reader: Reader) -> Outcome:
    """Tokens per second of `left` over those of its counterpart. Shown, never required: without alternating
    repeats a ratio of single runs cannot be told from run-to-run noise."""
    left = check["left"]
    expected = f"`{left}` is as fast as its counterpart"
    runs = _runs(reader.records(arm.folder / left / "throughput.jsonl", 0))
    if not runs:
        return Outcome("ERROR", expected, "no throughput run was recorded", required=False)
    rate, noise = spread([run["tokens_per_s"] for run in runs])
    counts: dict[str, Any] = {"runs": len(runs), "tokens_per_s": rate, "spread": noise}
    counts["kv_capacity_tokens"] = runs[-1]["kv_capacity_tokens"]
    text = f"{rate:,.0f} tokens/s"
    other = counterpart(attempt, arm, check, "throughput")
    theirs = _runs(reader.records(other[1] / "throughput.jsonl", 0)) if other else []
    caveat = "the sides were not alternated and repeated, so a ratio within run-to-run noise says nothing"
    if other and theirs:
        their_rate, _ = spread([run["tokens_per_s"] for run in theirs])
        counts |= {"tokens_per_s_other": their_rate, "ratio": rate / their_rate, "runs_other": len(theirs)}
        text += f", {their_rate:,.0f} in `{other[0]}`: {rate / their_rate:.3f}x"
        second = _second_ratio(attempt, arm, reader) if other[0].startswith(BASE) else None
        if second is not None:
            ratios = sorted((rate / their_rate, second))
            counts |= {"ratio": math.sqrt(ratios[0] * ratios[1]), "interval": ratios}
            text += f", and {second:.3f}x when both ran again in turn: {counts['ratio']:.3f}x together"
            caveat = "two alternating runs a side span the noise that was seen, and are too few to bound it"
    return Outcome("INCONCLUSIVE", expected, text, counts, caveat=caveat, required=False)


def _second_ratio(attempt: Attempt, arm: Arm, reader: Reader) -> float | None:
    """Of the second runs, which come in the order candidate, base; None of attempts from before there were any."""
    folders = [one.again for one in attempt.arms if one.name in (arm.name, "base")]
    if not all(folder.is_dir() for folder in folders):
        return None
    found = [_runs(reader.records(folder / "throughput.jsonl", 0)) for folder in folders]
    if not all(found):
        return None
    ours, theirs = (spread([run["tokens_per_s"] for run in runs])[0] for runs in found)
    return ours / theirs


def _runs(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["kind"] == "run"]
