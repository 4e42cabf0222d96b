"""Puts complete references into the store: gangs of their own, and what a scenario observed after its own start."""

import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from collectors.records import rank_file
from orchestrator.cell import FRESH
from orchestrator.judge.attempt import PER_RANK, REFERENCE
from orchestrator.judge.kernels import STEM as KERNELS
from orchestrator.staging import ArmGangs
from orchestrator.store import Store, move_in, sync_folder, write_json
from workloads.spec import GangSpec

log = logging.getLogger(__name__)

_END_BYTES = 256  # that surely hold the last record


def publish(store: Store, gangs: ArmGangs) -> None:
    """After all gangs of an arm ended well. A reference whose records are not whole stays where it is: the judge says
    what is wrong with them, and the next attempt builds it anew."""
    attempt = gangs.gang_set.folder.parent
    origin = f"{attempt.parent.name}/{attempt.name}"
    ranks = _ranks(gangs.gang_set.gangs)
    for key, folder in gangs.built.items():
        if _whole(folder / FRESH, gangs.collect[key], ranks):
            write_json(folder / REFERENCE, {"observation": FRESH, "attempt": origin})
            move_in(folder, store.references / key)
    for key, observation in gangs.served.items():
        if _whole(observation, gangs.collect[key], ranks):
            _copy_in(
                store.references / key, observation, _files(observation, gangs.collect[key], ranks), origin
            )


def _ranks(gangs: Sequence[GangSpec]) -> int:
    return gangs[0].parallelism.ranks


def _files(observation: Path, collect: Sequence[str], ranks: int) -> Iterator[Path]:
    """What the collectors of an observation leave behind, and which kernels served, where the engine says so."""
    for collector in collect:
        if collector in PER_RANK:
            yield from (rank_file(observation, collector, rank) for rank in range(ranks))
        else:
            yield observation / f"{collector}.jsonl"
    yield from sorted(observation.glob(f"{KERNELS}-*.jsonl"))


def _whole(observation: Path, collect: Sequence[str], ranks: int) -> bool:
    broken = [path for path in _files(observation, collect, ranks) if not _is_ended(path)]
    if broken:
        log.info("%s is no reference: %s has no end", observation, broken[0])
    return not broken


def _is_ended(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        last = file.read().splitlines()[-1:]
    return bool(last) and last[0].startswith(b'{"kind":"end"') and last[0].endswith(b"}")


def _copy_in(final: Path, observation: Path, files: Iterator[Path], origin: str) -> None:
    """Copies, since the records are evidence of their attempt as well. Whole or not at all, also after a crash."""
    temporary = final.with_name(f".{final.name}-{secrets.token_hex(4)}")
    copy = temporary / observation.name
    for folder in (temporary, copy):
        folder.mkdir(mode=0o700, parents=True)
    for path in files:
        shutil.copyfile(path, copy / path.name)
        with (copy / path.name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(copy)
    write_json(temporary / REFERENCE, {"observation": observation.name, "attempt": origin})
    move_in(temporary, final)
