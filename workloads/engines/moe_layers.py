"""Which kernel serves the routed experts of a rank of the native engine: chosen once, and told layer by layer."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from workloads.engines.protocol import Rule, UnsupportedError
from workloads.kernels.moe_choice import Choice, Machine
from workloads.kernels.moe_kernels import machine
from workloads.models.architectures import model_plan
from workloads.models.experts import RoutedExperts
from workloads.models.gpt_oss.moe import RoutedExperts as GptOssExperts
from workloads.models.planning import chosen_kernel
from workloads.models.qwen3.mlp import RoutedExperts as Qwen3Experts
from workloads.spec import GangSpec

RULES = (
    Rule("*.experts.invalid_ids", "runtime", "counts choices of tokens that are no expert's; no weight"),
)
OF_FAMILY = Choice("torch", "the family's own in plain torch, the only one that reads its experts")


def moe_choice(spec: GangSpec, device: torch.device) -> Choice:
    """The kernel for the model's experts on this rank's machine. Raises UnsupportedError where the config wants a fast
    one and there is none, or was planned for another GPU."""
    here = machine(device)
    _check_architecture(spec.backend.arch, here)
    architecture, layout, asked = spec.model.architecture, spec.parallelism, spec.backend.moe_kernel
    experts = model_plan(architecture).experts(getattr(spec.model, architecture))
    choice = chosen_kernel(experts, asked, layout.redundant_experts, layout.ep, here)
    if choice.fallback and not spec.backend.moe_fallback:
        raise UnsupportedError(
            f"backend.moe_kernel is {spec.backend.moe_kernel} and backend.moe_fallback is false, and on this machine "
            f"only its reference in plain torch could run: {choice.reason}. Set backend.moe_fallback=true to measure "
            "with that one."
        )
    return choice


def moe_layers(roots: Mapping[str, nn.Module], choice: Choice) -> list[dict[str, Any]]:
    """A record for each layer with routed experts: {root, module, kernel, reason, fallback, experts: of this rank,
    invalid_ids: choices so far that are no expert's, None where nobody counts them, folded_groups: groups of weights
    whose exponent the kernel's layout could not hold, None where it has no such limit}. Waits for the device."""
    return [
        {"root": root, "module": path, **record}
        for root, model in roots.items()
        for path, module in model.named_modules()
        for record in _record(module, choice)
    ]


def _check_architecture(arch: str, here: Machine) -> None:
    major = {"sm90": 9, "sm100": 10}.get(arch)
    if here.capability is not None and major is not None and here.capability[0] != major:
        raise UnsupportedError(
            f"backend.arch is {arch}, and this rank's GPU has compute capability {here.capability[0]}."
            f"{here.capability[1]}: kernels, padding and memory were planned for another one. Choose the backend and "
            "the cluster of the GPUs that are there."
        )


def _record(module: nn.Module, choice: Choice) -> Iterator[dict[str, Any]]:
    if isinstance(module, RoutedExperts):
        _, local = module.group.share(len(module.slots), "num_experts")
        counts = {
            "invalid_ids": int(module.invalid_ids),
            "folded_groups": sum(module.folded) if module.folded else None,
        }
        yield {"experts": local, **counts, **_told(choice)}
    elif isinstance(module, GptOssExperts | Qwen3Experts):
        yield {"experts": None, "invalid_ids": None, "folded_groups": None, **_told(OF_FAMILY)}


def _told(choice: Choice) -> dict[str, Any]:
    return {"kernel": choice.kernel, "reason": choice.reason, "fallback": choice.fallback}
