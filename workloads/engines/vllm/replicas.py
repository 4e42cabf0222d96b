"""What data-parallel replicas tell each other: the generations of all go to the process of rank 0."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not declared

from workloads.engines.protocol import Generation, Prompt
from workloads.spec import GangSpec


class Replicas:
    """The replica of this process among all. A plain key-value store and no process group, which belongs to vLLM."""

    def __init__(self, spec: GangSpec, rank: int) -> None:
        self.number = rank // spec.ranks_per_member
        self.count = spec.parallelism.ranks // spec.ranks_per_member
        self._rounds = 0
        self._store: TCPStore | None = None
        if self.count > 1:
            timeout = timedelta(seconds=spec.collective_timeout_s)
            self._store = TCPStore(
                spec.master_addr, spec.master_port, self.count, is_master=self.number == 0, timeout=timeout
            )

    def share(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Those that this replica answers."""
        return prompts[self.number :: self.count]

    def collect(self, generations: list[Generation], total: int) -> list[Generation]:
        """All generations in the order of the requests, on replica 0; none elsewhere."""
        if self._store is None:
            return generations
        self._rounds += 1
        key = f"generations/{self._rounds}"
        self._store.set(f"{key}/{self.number}", json.dumps([asdict(one) for one in generations]))
        if self.number:
            return []
        by_replica = [
            [Generation(**one) for one in json.loads(self._store.get(f"{key}/{number}"))]
            for number in range(self.count)
        ]
        return [by_replica[i % self.count][i // self.count] for i in range(total)]

    def leave(self) -> None:
        """Replica 0 serves the store, so it leaves last."""
        if self._store is not None:
            self._store.set(f"left/{self.number}", "")
            if self.number == 0:
                self._store.wait([f"left/{number}" for number in range(self.count)])
