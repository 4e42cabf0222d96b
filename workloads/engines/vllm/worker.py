"""What runs inside every vLLM worker, added through `worker_extension_cls`; names begin with `refit_`.

vLLM refuses an extension whose names its worker has already, so there is nothing here beside what is called.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from collectors.located import LocatedPieces
from collectors.tensors import TensorAuditor
from workloads import heartbeat
from workloads.engines.protocol import Part, Rule
from workloads.engines.vllm import faults, saved, transfer
from workloads.engines.vllm.packed import packed_weights
from workloads.engines.vllm.rules import Rules, read_rules
from workloads.engines.vllm.sources import digest
from workloads.loading.checkpoint import open_checkpoint
from workloads.observer import RankObserver
from workloads.spec import GangSpec

if "vllm" in sys.modules:  # which imports this module before it looks for weight transfer engines
    transfer.register()


log = logging.getLogger(__name__)
IMPORTED = digest()


class WorkerModels:
    """The models of one worker, as the auditor sees them: the target, and a drafter where there is one."""

    def __init__(self, worker: Any, rules: Rules) -> None:
        self._runner = worker.model_runner
        self._rules = rules

    def roots(self) -> Mapping[str, nn.Module]:
        roots = {"target": self._runner.get_model()}
        draft = self._runner.get_draft_model()
        return roots | ({"draft": draft} if isinstance(draft, nn.Module) else {})

    def parts(self, root: str) -> Sequence[Part]:
        """None: `collectors.located` finds them by content."""
        return ()

    def rules(self) -> Sequence[Rule]:
        return self._rules.tensors

    def runtime_tensors(self) -> Mapping[str, torch.Tensor]:
        """None by name: `around` has them."""
        return {}

    def around(self) -> Mapping[str, nn.Module]:
        """What runs the models: its buffers, caches and samplers are state too, though nothing of a checkpoint."""
        holder = nn.Module()
        vars(holder)["state"] = self._runner
        return {"runner": holder}


class AuditExtension:
    """Methods for `collective_rpc`. State lives in one attribute, set by `refit_prepare`."""

    if TYPE_CHECKING:  # of vLLM's worker
        rank: int
        model_runner: Any
        vllm_config: Any
        reload_weights: Any
        save_tensorized_model: Any

    def refit_prepare(self, gang_file: str, first_rank: int) -> dict[str, Any]:
        """Makes this worker the observer of its rank; returns which rank that is and which file runs here."""
        import vllm

        spec = GangSpec.read(Path(gang_file))
        config = self.vllm_config
        rank = first_rank + config.parallel_config.data_parallel_index * spec.parallelism.tp + self.rank
        rules = read_rules(vllm.__version__)
        models = WorkerModels(self, rules)
        drafts = any(checkpoint.draft for checkpoint in spec.checkpoints.values())
        auditor = TensorAuditor(
            models,
            LocatedPieces(
                spec.parallelism.tp, rules.not_loaded, ("target", "draft") if drafts else ("target",)
            ),
            packed=lambda: packed_weights(models.roots()),
            around=models.around,
            header={"engine": {"name": "vllm", "version": vllm.__version__, "rules": rules.version}},
        )
        self.refit_models, self.refit_rank = models, rank
        self.refit_observer = RankObserver(models, spec, rank, auditor)
        if spec.ranks_per_member > 1 and spec.backend.url is None:  # a server's worker outlives whoever looks
            beat = heartbeat.worker_file(Path(spec.output), rank, os.getpid())
            self.refit_beating = heartbeat.beating(beat)
            self.refit_beating.__enter__()
        return {"rank": rank, "source": __file__, "imported": IMPORTED}

    def refit_tensors(self, observation: str, checkpoint: str) -> None:
        self.refit_observer.tensors(observation, checkpoint)

    def refit_memory(self, observation: str) -> None:
        self.refit_observer.memory(observation)

    def refit_trace(self, on: bool) -> None:
        """Between these two calls every forward pass on this thread is traced."""
        if on:
            self.refit_tracing = self.refit_observer.tracing()
            self.refit_tracing.__enter__()
        else:
            self.refit_tracing.__exit__(None, None, None)

    def refit_inject(self, fault: str, rank: int) -> str | None:
        """Harms the models of one rank; returns the path of what was harmed there."""
        if rank != self.refit_rank:
            return None
        path = faults.inject(fault, self.refit_models.roots())
        log.warning("rank %d: fault %s did harm to %s", rank, fault, path)
        return path

    def refit_names(self, folder: str) -> list[str]:
        return list(open_checkpoint(folder).names())

    def refit_iterate(self, folder: str) -> None:
        """An update whose tensors come one by one, each in memory of its own that is gone after its turn."""
        self.reload_weights(weights_iterator=_each(folder))

    def refit_save(self, via: str, checkpoint: str, file: str) -> None:
        """Writes this worker's file of tensors for a start via tensorizer; file: a pattern where there are several."""
        own = file % self.rank if "%" in file else file
        if via == saved.RAW:
            saved.write_raw(checkpoint, own)
            return
        try:
            self.save_tensorized_model(tensorizer_config={"tensorizer_uri": file})
        except Exception as error:
            # When all tensors are written, vLLM asks a hub for the rest of the model, which a folder's name is not in.
            if not type(error).__module__.startswith("huggingface_hub"):
                raise
            log.warning("%s is written; vLLM then found no hub: %s", own, error)


def _each(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    reader = open_checkpoint(folder)
    for name in reader.names():
        yield name, reader.get(name).clone()
