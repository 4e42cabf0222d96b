"""The native engine: our own model stack, one process a rank, with the complete life of its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from workloads.engines.moe_layers import RULES as MOE_RULES
from workloads.engines.moe_layers import moe_choice, moe_layers
from workloads.engines.native_weights import NativeWeights
from workloads.engines.protocol import Generation, Part, Prompt, Rule
from workloads.engines.runner import Run, Served, check_prompts
from workloads.engines.scheduler import Limits
from workloads.engines.tokenizer import make_tokenizer
from workloads.faults import loader_class
from workloads.kernels.moe_kernels import make_moe_kernel
from workloads.loading.lifecycle import EventSink, Lifecycle
from workloads.loading.loader import UpdateStats
from workloads.models.adapters import RULES as ADAPTER_RULES
from workloads.models.adapters import wrap_linears
from workloads.models.architectures import ARCHITECTURES
from workloads.models.online_fp8 import RULES as ONLINE_RULES
from workloads.models.online_fp8 import quantize_online
from workloads.models.parallel import gather_objects, make_groups
from workloads.models.served import Cache, Drafter, Setting, Stack, Target, model_stack
from workloads.spec import GangSpec, Sampling


class NativeEngine(NativeWeights):
    """One rank of a model stack. With several ranks the default process group must exist already.

    Faults of the specification are in the loaders' class. Raises ValueError for a specification that this engine
    cannot serve.
    """

    def __init__(self, spec: GangSpec, rank: int, sink: EventSink | None = None) -> None:
        backend, architecture = spec.backend, spec.model.architecture
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"model.architecture is {architecture!r}; the native engine runs {', '.join(ARCHITECTURES)}."
            )
        config, groups = getattr(spec.model, architecture), make_groups(spec.parallelism, rank)
        folder = Path(next(iter(spec.checkpoint_dirs.values()), "."))
        self.tokenizer = make_tokenizer(spec.model.tokenizer, config.vocab_size, folder)
        self.device = torch.device(backend.device)
        self.moe_choice = moe_choice(spec, self.device)
        with self.device:
            kernel = make_moe_kernel(self.moe_choice.kernel, backend.max_batch_tokens)
            texts = partial(self.tokenizer.texts, config.vocab_size)
            fused, redundant = self.moe_choice.has_layout, spec.parallelism.redundant_experts
            setting = Setting(config, groups, kernel, fused, texts, redundant)
            roots = self.make_roots(model_stack(architecture), setting)
        if backend.lora_rank:
            with self.device:
                for root in roots.values():
                    wrap_linears(root, backend.lora_rank)
        if backend.online_quantization == "fp8":
            for root in roots.values():
                quantize_online(root)
        super().__init__(spec, rank, groups, roots, loader_class(spec.faults), Lifecycle(sink))
        self._caches: dict[str, list[Cache]] = {}

    def make_roots(self, stack: Stack, setting: Setting[Any]) -> Mapping[str, Target | Drafter]:
        """The models of this rank, not loaded yet."""
        return stack.make_roots(setting)

    def start(self, checkpoint: str, via: str) -> UpdateStats:
        """As of `NativeWeights`, and make room for requests."""
        stats = super().start(checkpoint, via)
        slots, positions = self.spec.backend.max_requests, self.spec.backend.max_model_len
        with self.device:
            self._caches = {name: root.make_caches(slots, positions) for name, root in self.roots().items()}
        return stats

    # What the auditor sees ---------------------------------------------------------------------------

    def parts(self, root: str) -> Sequence[Part]:
        modules = self.roots()[root].weight_modules()
        return [part for path, module in modules for part in module.parts(f"{root}:{path}")]

    def rules(self) -> Sequence[Rule]:
        backend = self.spec.backend
        online = ONLINE_RULES if backend.online_quantization != "none" else ()
        adapters = ADAPTER_RULES if backend.lora_rank else ()
        return (*model_stack(self._architecture).RULES, *MOE_RULES, *online, *adapters)

    def moe_layers(self) -> list[dict[str, Any]]:
        """Which kernel serves each layer with routed experts here, see `workloads.engines.moe_layers`."""
        return moe_layers(self.roots(), self.moe_choice)

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

        Prompt i runs on data-parallel rank i mod dp; the last pipeline stage tells what came of it. Global rank 0
        returns all generations in the order of the prompts, the other ranks none.
        """
        self._require_serving()
        backend, groups = self.spec.backend, self.groups
        check_prompts(prompts, params.max_new_tokens, backend.max_model_len, self.config.vocab_size)
        limits = Limits(backend.max_requests, backend.max_batch_tokens, params.max_new_tokens)
        mine = prompts[groups.dp_rank :: groups.dp]
        with self.lifecycle.forward(), torch.no_grad():
            finished = Run(self._served(), mine, params, limits, self.tokenizer.eos_ids).to_end()
        tells = groups.tp.rank == 0 and groups.on_last_stage
        by_rank = gather_objects(groups.world, finished if tells else None)
        by_dp = [told for told in by_rank if told is not None]
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
