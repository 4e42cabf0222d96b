"""A decode step in a captured graph: replayed after an update it is what the engine computes then, as long as nothing
that the graph reads has moved; and where a reload moves storage, the replay goes on with the old weights."""

from pathlib import Path

import pytest
import torch
from family_engine import make_spec
from torch import nn

from workloads import faults
from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.moe import LatentMoE

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
CONFIG = KimiK3Config(num_layers=2, full_attention_layers=[1], num_experts=8)
MOE = {"device": "cuda", "arch": "sm90", "moe_kernel": "mega_moe", "moe_fallback": False}


class Decode:
    """The mixture of experts of a layer for one token of four requests, as a graph and by the engine itself."""

    def __init__(self, engine: NativeEngine) -> None:
        [self._module, *_] = (
            m for root in engine.roots().values() for m in root.modules() if isinstance(m, LatentMoE)
        )
        self._x = torch.randn(4, CONFIG.hidden_size, device="cuda").to(torch.bfloat16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            self._module(self._x)  # compiles, and makes the handles that capturing may not make
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._out = self._module(self._x)
        self.held = _storages(
            self._module
        )  # as the memory pool of a graph would: freed, they might be handed out anew

    def eager(self) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self._module(self._x)
        return out.clone()

    def replayed(self) -> torch.Tensor:
        self._graph.replay()
        torch.cuda.synchronize()
        return self._out.clone()

    def moved(self) -> bool:
        return [s.data_ptr() for s in _storages(self._module)] != [s.data_ptr() for s in self.held]


def _storages(module: nn.Module) -> list[torch.UntypedStorage]:
    """Of the experts as the kernel reads them, and of all parameters of the layer."""
    experts = [
        tensor
        for part in module.modules()
        if hasattr(part, "transformed")
        for tensor in part.transformed() or ()
    ]
    return [tensor.untyped_storage() for tensor in (*experts, *module.parameters())]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(CONFIG, 0, tmp_path_factory.mktemp("decode") / "checkpoint")


def started(checkpoint: Path, *injected: str) -> NativeEngine:
    spec = make_spec(checkpoint, CONFIG, **MOE)
    spec.faults = list(injected)
    engine = faults.engine_class(injected)(spec, 0)
    engine.start("old", "safetensors")
    return engine


@pytest.mark.parametrize("via", ["layerwise", "direct", "per_expert"])
def test_a_replay_after_an_update_is_what_the_engine_computes(checkpoint: Path, via: str) -> None:
    engine = started(checkpoint)
    decode = Decode(engine)
    old = decode.eager()
    assert torch.equal(decode.replayed(), old)
    engine.update("new", via)
    assert not decode.moved()
    assert torch.equal(decode.replayed(), decode.eager())
    assert not torch.equal(decode.replayed(), old)
    engine.update("old", via)
    assert torch.equal(decode.replayed(), old)


@pytest.mark.parametrize("via", ["layerwise", "direct"])
def test_a_replay_after_storage_has_moved_reads_the_old_weights(checkpoint: Path, via: str) -> None:
    """The engine answers rightly, its graph does not: what the audit calls `moved` is a wrong answer in production."""
    engine = started(checkpoint, "kernel_object_rebuilt")
    decode = Decode(engine)
    old = decode.eager()
    engine.update("new", via)
    assert decode.moved()
    eager = decode.eager()
    assert not torch.equal(eager, old)
    assert not torch.equal(decode.replayed(), eager)


def test_ids_of_no_expert_are_counted_in_a_graph(checkpoint: Path) -> None:
    engine = started(checkpoint)
    experts = next(m for m in engine.roots()["target"].modules() if isinstance(m, LatentMoE)).experts
    x = torch.randn(2, CONFIG.moe_latent_size, device="cuda").to(torch.bfloat16)
    idx, weights = torch.zeros((2, 4), dtype=torch.int64, device="cuda"), torch.ones(2, 4, device="cuda")
    with torch.no_grad():
        experts(x, idx, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            experts(x, idx, weights)
    before = int(experts.invalid_ids)
    idx[0, 0], idx[1, 1] = 1 << 40, -7  # no check looks at values while a graph runs
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert int(experts.invalid_ids) == before + 4
    assert engine.moe_layers()[0]["invalid_ids"] == before + 4
