"""Observes one rank from inside the process that holds its tensors, and writes that rank's records."""

import functools
from contextlib import AbstractContextManager
from pathlib import Path

from collectors.memory import gather_memory
from collectors.records import rank_file
from collectors.tensors import TensorAuditor
from workloads.engines.protocol import Audited
from workloads.imported import require_own_code
from workloads.loading.checkpoint import CheckpointReader
from workloads.loading.perturb import open_view
from workloads.spec import GangSpec


class RankObserver:
    """The `Observer` of one rank. auditor: of `engine`, where it is not the plain one."""

    def __init__(
        self, engine: Audited, spec: GangSpec, rank: int, auditor: TensorAuditor | None = None
    ) -> None:
        self._engine, self._spec, self._rank = engine, spec, rank
        self._auditor = auditor or TensorAuditor(engine)
        self._reader = functools.cache(self._open)

    def tensors(self, observation: str, checkpoint: str) -> None:
        """Audits every tensor against checkpoint entry `checkpoint`, which the engine should hold.

        Raises CodeError where this process runs code of another arm: its tensors would be no evidence.
        """
        require_own_code(self._spec.package_dir)
        draft = self._spec.checkpoints[checkpoint].draft
        readers = {"draft": self._reader(draft)} if draft else {}
        self._auditor.observe(
            self._folder(observation), self._rank, observation, self._reader(checkpoint), readers
        )

    def memory(self, observation: str) -> None:
        gather_memory(self._engine, rank_file(self._folder(observation), "memory", self._rank), self._rank)

    def tracing(self) -> AbstractContextManager[object]:
        """Around forward passes whose storages later audits must reach."""
        return self._auditor.trace()

    def _folder(self, observation: str) -> Path:
        return Path(self._spec.output) / observation

    def _open(self, name: str) -> CheckpointReader:
        return open_view(self._spec.checkpoints[name], self._spec.checkpoint_dirs[name])
