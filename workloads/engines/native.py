"""The native engine: our own model stack, one process a rank, with the complete life of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import cast

import torch

from workloads.engines.protocol import Generation, Part, Prompt, Rule, UnsupportedError
from workloads.engines.runner import Run, Served, check_prompts
from workloads.engines.scheduler import Limits
from workloads.engines.tokenizer import make_tokenizer
from workloads.faults import loader_class
from workloads.kernels.moe import make_moe_kernel
from workloads.loading.checkpoint import CheckpointReader, validate
from workloads.loading.lifecycle import EventSink, Lifecycle
from workloads.loading.loader import Loader, UpdateStats
from workloads.loading.perturb import open_view
from workloads.loading.tensor_table import every_tensor
from workloads.models.architectures import ARCHITECTURES, tensor_table
from workloads.models.parallel import gather_objects, make_groups
from workloads.models.served import Cache, Drafter, Setting, Target, model_stack
from workloads.spec import GangSpec, Sampling

START_VIA = ("safetensors", "dummy")
UPDATE_VIA = ("layerwise", "direct")


class NativeEngine:
    """One rank of a model stack. With several ranks the default process group must exist already.

    loaders: one for each root, `target` and, if the model has one, `draft`. Faults of the specification are in their
    class. Raises ValueError for a specification that this engine cannot serve.
    """

    def __init__(self, spec: GangSpec, rank: int, sink: EventSink | None = None) -> None:
        self.spec, self.rank = spec, rank
        backend, self._architecture = spec.backend, spec.model.architecture
        if self._architecture not in ARCHITECTURES:
            raise ValueError(
                f"model.architecture is {self._architecture!r}; the native engine runs {', '.join(ARCHITECTURES)}."
            )
        self.config = getattr(spec.model, self._architecture)
        self.groups = make_groups(spec.parallelism, rank)
        self.lifecycle = Lifecycle(sink)
        folder = Path(next(iter(spec.checkpoint_dirs.values()), "."))
        self.tokenizer = make_tokenizer(spec.model.tokenizer, self.config.vocab_size, folder)
        self.device = torch.device(backend.device)
        kernel, fused = make_moe_kernel(backend.moe_kernel), backend.moe_kernel == "mega_moe"
        with self.device:
            self._roots = model_stack(self._architecture).make_roots(
                Setting(self.config, self.groups, kernel, fused)
            )
        self._caches: dict[str, list[Cache]] = {}
        make_loader = loader_class(spec.faults)
        self.loaders: dict[str, Loader] = {
            name: make_loader(name, root, self.lifecycle) for name, root in self.roots().items()
        }

    # Weights ---------------------------------------------------------------------------------------

    def start(self, checkpoint: str, via: str) -> UpdateStats:
        """Load the named checkpoint into fresh parameters, or random weights (`dummy`), and make room for requests.

        Raises CheckpointError, before anything is touched, when the checkpoint is not this model's.
        """
        if self._caches:
            raise RuntimeError("This engine has started already; use update, or a new engine.")
        if via not in START_VIA:
            raise ValueError(f"via={via!r} is no way to start; choose one of {', '.join(START_VIA)}.")
        reader = self._open(checkpoint) if via == "safetensors" else None
        seed = self.spec.checkpoints[checkpoint].seed
        stats = self._load(
            via, lambda loader: loader.cold(reader) if reader is not None else loader.dummy(seed)
        )
        slots, positions = self.spec.backend.max_requests, self.spec.backend.max_model_len
        with self.device:
            self._caches = {name: root.make_caches(slots, positions) for name, root in self.roots().items()}
        return stats

    def update(self, checkpoint: str, via: str) -> UpdateStats:
        """Replace the weights that serve. Raises CheckpointError before anything is touched, ReloadError when the
        models must not serve any more."""
        self._require_started()
        if via not in UPDATE_VIA:
            raise ValueError(f"via={via!r} is no way to update; choose one of {', '.join(UPDATE_VIA)}.")
        reader = self._open(checkpoint)
        return self._load(
            via, lambda loader: loader.layerwise(reader) if via == "layerwise" else loader.direct(reader)
        )

    def sleep(self, level: int) -> None:
        raise UnsupportedError("The native engine has no sleep mode: its weights stay where they serve.")

    def wake(self) -> None:
        raise UnsupportedError("The native engine has no sleep mode to wake from.")

    def _open(self, checkpoint: str) -> CheckpointReader:
        reader = open_view(self.spec.checkpoints[checkpoint], Path(self.spec.checkpoint_dirs[checkpoint]))
        table = tensor_table(self._architecture)
        validate(reader, every_tensor(table.sections(self.config)), ignore=table.NOT_LOADED)
        return reader

    def _load(self, via: str, one: Callable[[Loader], UpdateStats]) -> UpdateStats:
        """One load of every root; the statistics of all."""
        self.lifecycle.start_load(via)
        each = [one(loader) for loader in self.loaders.values()]
        return UpdateStats(**{f.name: sum(getattr(s, f.name) for s in each) for f in fields(UpdateStats)})

    # What the auditor sees ---------------------------------------------------------------------------

    def roots(self) -> Mapping[str, Target | Drafter]:
        return self._roots

    def parts(self, root: str) -> Sequence[Part]:
        modules = self.roots()[root].weight_modules()
        return [part for path, module in modules for part in module.parts(f"{root}:{path}")]

    def rules(self) -> Sequence[Rule]:
        return model_stack(self._architecture).RULES

    def runtime_tensors(self) -> Mapping[str, torch.Tensor]:
        """Caches: what serving writes, by `root:caches.LAYER.NAME`."""
        return {
            f"{root}:caches.{layer}.{field.name}": getattr(cache, field.name)
            for root, caches in self._caches.items()
            for layer, cache in enumerate(caches)
            for field in fields(cache)
        }

    # Serving ---------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], params: Sampling) -> list[Generation]:
        """Continue every prompt; all ranks must call it with the same arguments.

        Prompt i runs on data-parallel rank i mod dp. Global rank 0 returns all generations in the order of the
        prompts, the other ranks none.
        """
        self._require_started()
        backend, groups = self.spec.backend, self.groups
        check_prompts(prompts, params.max_new_tokens, backend.max_model_len, self.config.vocab_size)
        limits = Limits(backend.max_requests, backend.max_batch_tokens, params.max_new_tokens)
        mine = prompts[groups.dp_rank :: groups.dp]
        with self.lifecycle.forward(), torch.no_grad():
            finished = Run(self._served(), mine, params, limits, self.tokenizer.eos_ids).to_end()
        by_rank = gather_objects(groups.world, finished if groups.tp.rank == 0 else [])
        by_dp = [by_rank[dp_rank * groups.tp.size] for dp_rank in range(groups.dp)] if by_rank else []
        return [by_dp[i % groups.dp][i // groups.dp] for i in range(len(prompts))] if by_dp else []

    def kv_capacity_tokens(self) -> int:
        """Tokens that the caches of all data-parallel ranks hold together."""
        return self.spec.backend.max_requests * self.spec.backend.max_model_len * self.groups.dp

    def stop(self) -> None:
        """Release the caches. The process group belongs to who made it."""
        self._caches = {}

    def _served(self) -> Served:
        return Served(
            self.groups,
            cast(Target, self._roots["target"]),
            self._caches["target"],
            cast(Drafter | None, self._roots.get("draft")),
            self._caches.get("draft", []),
            self.device,
        )

    def _require_started(self) -> None:
        if not self._caches:
            raise RuntimeError("This engine holds no weights yet: call start first.")
