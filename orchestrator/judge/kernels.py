"""Which kernel served the routed experts, by the ranks' records: told where it is not the one that was asked for, or
not that of the other side, and a failure where tokens chose what is no expert."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from collectors.records import rank_file
from orchestrator.judge.answers import Outcome
from orchestrator.judge.attempt import Arm, Attempt
from orchestrator.judge.diagnose import Cause
from orchestrator.judge.findings import Ledger
from orchestrator.judge.records import Reader, Record
from orchestrator.judge.sentences import rank_list
from workloads.kernels.mega_moe_hopper_sizes import FOLDS

GATE = "gate:kernels"
STEM = "kernels"


def outcomes(attempt: Attempt, arm: Arm, reader: Reader, ledger: Ledger) -> Iterator[tuple[str, Outcome]]:
    """Checks by name. None for an arm that recorded no layer with experts: dense models, other engines, records from
    before there were any."""
    seen = {name: _records(attempt, arm.folder / name, reader) for name in attempt.moments}
    seen = {name: records for name, records in seen.items() if records}
    if not seen:
        return
    yield GATE, _chosen_ids(arm, seen, ledger)
    last = list(seen.values())[-1]
    if fallbacks := [record for record in last if record["fallback"]]:
        expected = "the fast kernel that backend.moe_kernel asks for serves every layer"
        text = _served(fallbacks)
        caveat = f"experts were computed in plain torch, not by the kernel that was asked for: {text}"
        yield "fast_kernel", Outcome("NOT_RUN", expected, text, caveat=caveat, required=False)
    if folded := sum(record["folded_groups"] or 0 for record in last):
        yield "exact_weights", _folded(folded)
    sides = {name: _records(attempt, folder, reader) for name, folder in _sides(attempt, arm)}
    if differing := {name: records for name, records in sides.items() if _kernels(records) != _kernels(last)}:
        yield "same_kernels", _different(last, differing)


def _records(attempt: Attempt, folder: Path, reader: Reader) -> list[Record]:
    """Of all ranks, in the order of the ranks. Where one wrote such a file, all of them must."""
    if not any(folder.glob(f"{STEM}-*.jsonl")):
        return []
    reader.ranks(folder, STEM, attempt.ranks)
    files = {rank: rank_file(folder, STEM, rank) for rank in range(attempt.ranks)}
    return [
        record
        for rank, path in files.items()
        if path.is_file()
        for record in reader.records(path, rank)
        if record["kind"] == "moe_layer"
    ]


def _sides(attempt: Attempt, arm: Arm) -> Iterator[tuple[str, Path]]:
    """What this arm is compared with: fresh starts, and for the candidate the base arm's last observation."""
    for name in sorted(attempt.compared_references & arm.references.keys()):
        yield name, arm.references[name]
    if arm.base is not None and attempt.moments:
        yield "base", arm.base / list(attempt.moments)[-1]


def _chosen_ids(arm: Arm, seen: Mapping[str, Sequence[Record]], ledger: Ledger) -> Outcome:
    """Counts grow from observation to observation; each is blamed for what came with it."""
    expected = "tokens choose among the experts that there are, or none"
    before: Counter[tuple[int, str]] = Counter()
    for observation, records in seen.items():
        causes = []
        for record in records:
            path, count = f"{record['root']}:{record['module']}", record["invalid_ids"] or 0
            if new := count - before[record["rank"], path]:
                causes.append(Cause("invalid_ids", record["rank"], path, note=f"{new:,} choices"))
            before[record["rank"], path] = count
        ledger.add(arm.name, observation, GATE, causes)
    total, served = before.total(), _served(list(seen.values())[-1])
    counts = {"invalid_ids": total}
    if not total:
        return Outcome("PASS", expected, served, counts)
    ranks = rank_list(rank for (rank, _), count in before.items() if count)
    text = f"{total:,} choices are neither an expert nor -1, {ranks}; {served}"
    return Outcome("FAIL", expected, text, counts)


def _served(records: Sequence[Record]) -> str:
    """`hopper_mega_moe in 3 layers (compute capability 9.0, mxfp4 experts)`, and so on for each other kernel."""
    layers: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for record in records:
        layers.setdefault((record["kernel"], record["reason"]), set()).add((record["root"], record["module"]))
    return "; ".join(
        f"{kernel} in {len(of)} layer{'s' if len(of) > 1 else ''} ({reason})"
        for (kernel, reason), of in sorted(layers.items())
    )


def _kernels(records: Sequence[Record]) -> set[str]:
    return {record["kernel"] for record in records}


def _folded(groups: int) -> Outcome:
    expected = "the kernel computes with exactly the checkpoint's weights"
    text = (
        f"{groups:,} groups of 32 weights lie more than {FOLDS} octaves below the largest of their row, and "
        f"the kernel takes them as {FOLDS} below"
    )
    return Outcome("INCONCLUSIVE", expected, text, {"groups": groups}, caveat=text, required=False)


def _different(own: Sequence[Record], others: Mapping[str, Sequence[Record]]) -> Outcome:
    expected = "both sides of a comparison are served by the same kernels"
    told = "; ".join(f"`{name}`: {_served(records) or 'not recorded'}" for name, records in others.items())
    text = f"this side: {_served(own)}; {told}"
    caveat = f"what differs between the sides may be their kernels' doing; {text}"
    return Outcome("INCONCLUSIVE", expected, text, caveat=caveat, required=False)
