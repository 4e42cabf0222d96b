"""The table of what each family has that can go wrong, held against the models themselves."""

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch

from orchestrator.config.compose import compose
from orchestrator.judge.records import INDISTINCT_BYTES
from workloads.faults._about import FEATURES
from workloads.faults.bare_copy import VECTORS
from workloads.kernels.moe_kernels import make_moe_kernel
from workloads.kernels.shuffled_moe import ShuffledMoE
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import ModelRoot
from workloads.models.architectures import model_plan, tensor_table
from workloads.models.deepseek_v4.attention import AttentionSink
from workloads.models.deepseek_v4.moe import SharedExperts
from workloads.models.deepseek_v41.fused import InKernelOrder
from workloads.models.dspark.drafter import BlockDrafter
from workloads.models.fp8_linear import Fp8Matrix
from workloads.models.openpangu.attention import SinkAttention
from workloads.models.parallel import RankGroups
from workloads.models.served import Setting, model_stack
from workloads.models.vision import VisionWrapper
from workloads.spec import Model


@pytest.mark.parametrize("model", sorted(FEATURES))
def test_features_are_those_of_the_models(model: str) -> None:
    [composed] = compose([f"model={model}"])
    assert composed.root is not None
    assert features_of(composed.root.model) == FEATURES[model]


def features_of(model: Model) -> set[str]:
    architecture = model.architecture
    config = getattr(model, architecture)
    setting = Setting(config, RankGroups(), make_moe_kernel("reference"), fused=False)
    roots = model_stack(architecture).make_roots(setting)
    found = {feature for root in roots.values() for feature in of_root(root)}
    found |= {"draft"} & roots.keys()
    found |= {"taps"} if isinstance(roots.get("draft"), BlockDrafter) else set()
    found |= {"context_copies"} if hasattr(roots.get("draft"), "context_proj") else set()
    found |= {"wrapper"} if isinstance(roots["target"], VisionWrapper) else set()
    found |= {"tied"} if any(map(_is_tied, roots.values())) else set()
    found |= {"experts"} if model_plan(architecture).experts(config) is not None else set()
    found |= {"consumed_experts"} if consumes(architecture, config) else set()
    names = [spec.name for spec in every_tensor(tensor_table(architecture).sections(config))]
    found |= {"numbered_experts"} if any(re.search(r"\.experts\.\d+\.", name) for name in names) else set()
    dtypes = {
        (spec.dtype, "scale" in spec.name)
        for spec in every_tensor(tensor_table(architecture).sections(config))
    }
    found |= {"e8m0"} if dtypes & {("U8", True), ("F8_E8M0", True)} else set()
    return found


def _is_tied(root: ModelRoot) -> bool:
    return len(list(root.named_parameters())) < len(list(root.named_parameters(remove_duplicate=False)))


def _changed(live: torch.Tensor | None, old: torch.Tensor) -> bool:
    """Whether a parameter does not stay as it was loaded; its bytes may also have gone elsewhere."""
    return live is None or live.shape != old.shape or not torch.equal(bits(live), bits(old))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def consumes(architecture: str, config: Any) -> bool:
    """Whether a fused kernel takes the parameters of the experts away."""
    setting = Setting(config, RankGroups(), make_moe_kernel("mega_moe_reference"), fused=True)
    roots = model_stack(architecture).make_roots(setting)
    for root in roots.values():
        root.process_weights_after_loading()
    modules = [module for root in roots.values() for _, module in root.weight_modules()]
    return any(module.live(name) is None for module in modules for name in module.weights)


def of_root(root: ModelRoot) -> Iterator[str]:
    shared = [module for module in root.modules() if isinstance(module, SharedExperts)]
    if shared:
        yield "shared_experts"
    scales = [p for module in shared for p in module.gate_up_proj.weights["weight_scale_inv"].placements]
    if any(prod(length for _, length in placement.source_region) > INDISTINCT_BYTES for placement in scales):
        yield "many_scales"
    for _, module in root.weight_modules():
        for name in module.weights:
            bits(module.get_parameter(name)).random_(0, 256)
        before = {name: module.get_parameter(name).clone() for name in module.weights}
        unmade = {name for name, value in vars(module).items() if value is None}
        module.post_process()
        if any(_changed(module.live(name), old) for name, old in before.items()):
            yield "in_place"
        if isinstance(vars(module).get("kernel"), ShuffledMoE):
            yield "kernel_object"
        if module.derived & vars(module).keys():
            yield "attributes"
        if module.derived & unmade:
            yield "processed"
        if "A_log" in module.weights:
            yield "decay"
        if isinstance(module, SinkAttention):
            yield "sinks"
        if module.derived & dict(module.named_buffers(recurse=False)).keys():
            yield "buffers"
        if module.weights.keys() & VECTORS:
            yield "vectors"
        if isinstance(module, InKernelOrder):
            yield "permuted"
        padded = [
            weight
            for weight in module.weights.values()
            if any(placement.padding(torch.Size(weight.shape)) for placement in weight.placements)
        ]
        if padded and isinstance(module, AttentionSink):
            yield "sink_padding"
        if padded and isinstance(module, Fp8Matrix):
            yield "shared_padding"
        for weight in padded:
            yield "unit_padding" if weight.creation_value else "padding"
        for weight in module.weights.values():
            if len(weight.placements) > 1:
                yield "fused"
    derived = [(module, name) for _, module in root.weight_modules() for name in module.derivations()]
    if derived:
        yield "derivations"
    if any(getattr(module, name) is None for module, name in derived):
        yield "left_to_hook"
