"""What updates need beside the resident model, measured as torch allocates it: at most one layer."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from k3_engine import OLD, start_engine

from workloads.engines.native import NativeEngine
from workloads.models.experts import RoutedExperts
from workloads.models.kimi_k3.config import KimiK3Config

EXPERTS = KimiK3Config().num_experts
_LAYER = re.compile(r"layers\.\d+\.")


def layer_bytes(engine: NativeEngine) -> int:
    """Of the largest layer's parameters, as they are loaded."""
    found: Counter[str] = Counter()
    for root in engine.roots().values():
        for path, module in root.weight_modules():
            where = _LAYER.search(path)
            sizes = (
                torch.empty(w.shape, dtype=w.dtype, device="meta").nbytes for w in module.weights.values()
            )
            found[where.group() if where else path] += sum(sizes)
    return max(found.values())


def expert_bytes(engine: NativeEngine) -> tuple[int, int]:
    """Of all experts of one layer as they are loaded, and of their second matrices alone."""
    experts = engine.roots()["target"].get_submodule("model.layers.1.block_sparse_moe.experts")
    assert isinstance(experts, RoutedExperts)
    sizes = {n: torch.empty(w.shape, dtype=w.dtype, device="meta").nbytes for n, w in experts.weights.items()}
    return sum(sizes.values()), sizes["w2_weight"]


def peak(engine: NativeEngine, via: str, files: set[int]) -> int:
    """Bytes allocated at once during an update, above those that were when it began. files: sizes of the mapped
    ones, which torch reports though they take no memory of its own."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        engine.update(OLD, via)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = [e for e in events if abs(e.nbytes()) not in files]
    assert len(allocated) < len(events), "the mapped file was not among the events"
    most = now = 0
    for event in sorted(allocated, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("via", ["layerwise", "direct", "per_expert"])
def test_an_update_needs_at_most_one_layer_beside_the_model(via: str, k3_checkpoint: Path) -> None:
    """Exactly what the plan of memory says: all experts of one layer, or without w2, or a single one."""
    engine = start_engine(k3_checkpoint)
    files = {file.stat().st_size for file in k3_checkpoint.glob("*.safetensors")}
    measured, layer = peak(engine, via, files), layer_bytes(engine)
    print(f"{via}: {measured} bytes beside the resident model, a layer has {layer}")
    experts, w2 = expert_bytes(engine)
    planned = {"layerwise": experts, "direct": experts - w2, "per_expert": 2 * experts // EXPERTS}
    assert planned["per_expert"] // 2 < measured <= min(layer, planned[via])
