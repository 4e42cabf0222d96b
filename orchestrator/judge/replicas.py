"""Compares ranks that hold the same shard: data-parallel replicas, replicas of expert shards, and what more than one
pipeline stage holds."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from orchestrator.judge.compare import ADDRESSED
from orchestrator.judge.diagnose import Cause
from orchestrator.judge.records import Audit

Prints = dict[str, str]  # path -> fingerprint

_EXPERTS = re.compile(r"(?<![A-Za-z_])experts?(?![A-Za-z])")


def fingerprints(audit: Audit) -> Prints:
    """What replicas must agree on: everything but runtime state and handles."""
    return {path: t["fp"] for path, t in audit.tensors.items() if t["class"] in ADDRESSED and t["nbytes"]}


class Group(NamedTuple):
    """Ranks that hold the same shard of the routed experts (`experts`) or of everything else; or, in different pipeline
    stages (`stages`), of what more than one of those holds, such as a tied embedding."""

    ranks: list[int]
    experts: bool = False
    stages: bool = False


def replica_groups(parallelism: Mapping[str, Any], ranks: int) -> Iterator[Group]:
    """Within a stage equal tensor-parallel index for everything but experts, equal expert-parallel index for those
    (which are sharded like the rest without it); across stages equal place in the stage."""
    stage = ranks // parallelism.get("pp", 1)
    expert_shards = parallelism["ep"] if parallelism["ep"] > 1 else parallelism["tp"]
    for start in range(0, ranks, stage):
        for size, experts in ((parallelism["tp"], False), (expert_shards, True)):
            for first in range(start, start + size):
                group = list(range(first, start + stage, size))
                if len(group) > 1:
                    yield Group(group, experts)
    if stage < ranks:
        yield from (Group(list(range(place, ranks, stage)), stages=True) for place in range(stage))


def outvoted(group: Group, by_rank: Sequence[Prints]) -> tuple[int, list[Cause]]:
    """Tensors compared within one group, and those of ranks that are not with its majority."""
    maps = [{p: fp for p, fp in by_rank[r].items() if is_expert(p) == group.experts} for r in group.ranks]
    if not group.stages and all(other == maps[0] for other in maps[1:]):
        return len(maps[0]), []
    holders = Counter(path for held in maps for path in held)
    asked = [path for path, count in holders.items() if count > 1 or not group.stages]
    causes = []
    for path in asked:
        voters = [
            (rank, held.get(path))
            for rank, held in zip(group.ranks, maps, strict=True)
            if path in held or not group.stages
        ]
        majority, votes = Counter(value for _, value in voters).most_common(1)[0]
        if votes < len(voters):
            causes += [
                Cause("replicas_differ", rank, path, now=value, expected=majority)
                for rank, value in voters
                if value != majority
            ]
    return len(asked), causes


@lru_cache(maxsize=1 << 17)
def is_expert(path: str) -> bool:
    """Whether a tensor belongs to routed experts, which differ between expert-parallel ranks."""
    return _EXPERTS.search(path) is not None
