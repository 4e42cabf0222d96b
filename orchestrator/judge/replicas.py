"""Compares ranks that hold the same shard: data-parallel replicas, and replicas of expert shards."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from orchestrator.judge.compare import ADDRESSED
from orchestrator.judge.diagnose import Cause
from orchestrator.judge.records import Audit

Prints = dict[str, str]  # path -> fingerprint

_EXPERTS = re.compile(r"(?<![A-Za-z_])experts?(?![A-Za-z])")


def fingerprints(audit: Audit) -> Prints:
    """What replicas must agree on: everything but runtime state and handles."""
    return {path: t["fp"] for path, t in audit.tensors.items() if t["class"] in ADDRESSED and t["nbytes"]}


def replica_groups(parallelism: Mapping[str, Any], ranks: int) -> Iterator[tuple[list[int], bool]]:
    """(ranks that hold the same shard, whether of the routed experts): equal tensor-parallel index for
    everything else, equal expert-parallel index for experts (which are sharded like the rest without it)."""
    expert_shards = parallelism["ep"] if parallelism["ep"] > 1 else parallelism["tp"]
    for size, experts in ((parallelism["tp"], False), (expert_shards, True)):
        for first in range(size):
            group = list(range(first, ranks, size))
            if len(group) > 1:
                yield group, experts


def outvoted(ranks: Sequence[int], experts: bool, by_rank: Sequence[Prints]) -> tuple[int, list[Cause]]:
    """Tensors compared within one group, and those of ranks that are not with its majority."""
    maps = [{p: fp for p, fp in by_rank[r].items() if is_expert(p) == experts} for r in ranks]
    causes = []
    if any(other != maps[0] for other in maps[1:]):
        for path in dict.fromkeys(p for m in maps for p in m):
            values = [m.get(path) for m in maps]
            majority, _ = Counter(values).most_common(1)[0]
            causes += [
                Cause("replicas_differ", rank, path, now=value, expected=majority)
                for rank, value in zip(ranks, values, strict=True)
                if value != majority
            ]
    return len(maps[0]), causes


@lru_cache(maxsize=1 << 17)
def is_expert(path: str) -> bool:
    """Whether a tensor belongs to routed experts, which differ between expert-parallel ranks."""
    return _EXPERTS.search(path) is not None
