"""Which kernel an engine takes for its experts, how it tells, and what it counts; the machine is pretended."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import start_toy
from k3_engine import NEW, OLD, make_spec, prompts

from collectors.kernels import ServesExperts, gather_kernels
from workloads.engines import moe_layers
from workloads.engines.native import NativeEngine
from workloads.engines.protocol import UnsupportedError
from workloads.kernels.mega_moe_hopper_kernel import HopperMegaMoE
from workloads.kernels.moe import MegaMoEReference, MoEKernel
from workloads.kernels.moe_choice import Choice, ExpertShape, Machine
from workloads.kernels.moe_kernels import make_moe_kernel
from workloads.models import planning
from workloads.models.experts import RoutedExperts
from workloads.spec import Sampling

H200 = Machine((9, 0), nvcc=True)
Pretend = Any


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Makes engines believe in a machine: a GPU's layout and checks run on the CPU, its kernel does not."""
    return lambda machine: monkeypatch.setattr(moe_layers, "machine", lambda device: machine)


def experts_of(engine: NativeEngine) -> list[RoutedExperts]:
    return [m for root in engine.roots().values() for m in root.modules() if isinstance(m, RoutedExperts)]


def test_every_layer_says_which_kernel_serves_it(k3_checkpoint: Path, tmp_path: Path) -> None:
    engine = NativeEngine(make_spec(k3_checkpoint), 0)
    engine.start(OLD, "safetensors")
    assert isinstance(engine, ServesExperts)
    gather_kernels(engine, tmp_path / "observed" / "kernels-00000.jsonl", 0)
    lines = (tmp_path / "observed" / "kernels-00000.jsonl").read_text().splitlines()
    *records, end = [json.loads(line) for line in lines]
    assert end["kind"] == "end"
    assert [record["root"] for record in records] == 3 * ["target"] + ["draft"]
    for record in records:
        assert record["module"].endswith(".experts")
        assert (record["kernel"], record["fallback"]) == ("mega_moe_reference", False)
        assert (record["experts"], record["invalid_ids"], record["folded_groups"]) == (32, 0, None)


@pytest.mark.parametrize(("name", "layers"), [("gpt_oss_combined", 2), ("qwen3_moe_fp8", 2)])
def test_families_with_a_kernel_of_their_own_say_so(name: str, layers: int) -> None:
    records = start_toy(name, OLD).moe_layers()
    assert [record["kernel"] for record in records] == layers * ["torch"]
    assert not any(record["fallback"] for record in records)


def test_a_fallback_is_recorded_or_refused_as_the_config_wants(k3_checkpoint: Path, pretend: Pretend) -> None:
    pretend(Machine((9, 0), nvcc=False))
    engine = NativeEngine(make_spec(k3_checkpoint), 0)
    assert {type(module.kernel) for module in experts_of(engine)} == {MegaMoEReference}
    [(kernel, fallback, reason)] = {(r["kernel"], r["fallback"], r["reason"]) for r in engine.moe_layers()}
    assert (kernel, fallback) == ("mega_moe_reference", True)
    assert "no nvcc is on the PATH" in reason
    with pytest.raises(UnsupportedError, match=r"moe_fallback is false, .* no nvcc is on the PATH"):
        NativeEngine(make_spec(k3_checkpoint, moe_fallback=False), 0)
    pretend(H200)
    NativeEngine(make_spec(k3_checkpoint, moe_fallback=False), 0)


def test_another_gpu_than_the_config_says_is_refused(k3_checkpoint: Path, pretend: Pretend) -> None:
    pretend(H200)
    with pytest.raises(UnsupportedError, match=r"backend.arch is sm100, .* compute capability 9.0"):
        NativeEngine(make_spec(k3_checkpoint, arch="sm100"), 0)
    NativeEngine(make_spec(k3_checkpoint, arch="sm90"), 0)


def test_the_choice_sees_the_dimensions_of_the_model(
    k3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ExpertShape | None, int]] = []

    def choose(asked: str, machine: Machine, experts: ExpertShape | None, ranks: int) -> Choice:
        seen.append((asked, experts, ranks))
        return Choice("reference", "a test wants it")

    monkeypatch.setattr(planning, "choose", choose)
    NativeEngine(make_spec(k3_checkpoint), 0)
    config = make_spec(k3_checkpoint).model.kimi_k3
    sizes = (config.num_experts, config.num_experts_per_token, config.moe_latent_size)
    assert seen == [("mega_moe", ExpertShape("mxfp4", *sizes, situ=True), 1)]


def test_the_layout_of_hopper_loads_and_updates_in_the_engine(k3_checkpoint: Path, pretend: Pretend) -> None:
    """Through every kind of reload, the experts read back are the checkpoint's; without its GPU it refuses to serve."""
    pretend(H200)
    engine = NativeEngine(make_spec(k3_checkpoint), 0)
    engine.start(OLD, "safetensors")
    kernel = experts_of(engine)[0].kernel
    assert isinstance(kernel, HopperMegaMoE)
    addresses = [t.data_ptr() for module in experts_of(engine) for t in module.transformed() or ()]
    plain = NativeEngine(make_spec(k3_checkpoint, moe_kernel="reference"), 0)
    plain.start(NEW, "safetensors")
    for via in ("layerwise", "direct", "per_expert"):
        engine.update(NEW, via)
        for mine, theirs in zip(experts_of(engine), experts_of(plain), strict=True):
            restored = [tensor for _, tensor in mine.consumed_weights().values()]
            assert all(map(torch.equal, restored, theirs.expert_weights()))
        engine.update(OLD, via)
        assert [record["folded_groups"] for record in engine.moe_layers()] == 4 * [0]
    assert [t.data_ptr() for m in experts_of(engine) for t in m.transformed() or ()] == addresses
    with pytest.raises(RuntimeError, match="runs on a Hopper GPU and x is on cpu"):
        engine.generate(prompts(3), Sampling(max_new_tokens=1))


def test_folded_groups_are_those_of_the_last_load_expert_by_expert(
    k3_checkpoint: Path, pretend: Pretend
) -> None:
    pretend(H200)
    engine = NativeEngine(make_spec(k3_checkpoint), 0)
    engine.start(OLD, "safetensors")
    module = experts_of(engine)[0]
    loaded = {name: tensor for name, (_, tensor) in module.consumed_weights().items()}
    for name, tensor in loaded.items():
        module.add_weight(name, module.weights[name])
        module.get_parameter(name).data.copy_(tensor)
    module.get_parameter("w13_weight_scale").data[3, 5, 0] = 1
    module.finalize()
    assert module.folded == [int(expert == 3) for expert in range(module.tensors.count)]
    assert engine.moe_layers()[0]["folded_groups"] == 1


@pytest.mark.parametrize("kernel", ["mega_moe", "reference"])
def test_ids_that_are_no_experts_are_counted(k3_checkpoint: Path, kernel: str) -> None:
    engine = NativeEngine(make_spec(k3_checkpoint, moe_kernel=kernel), 0)
    engine.start(OLD, "safetensors")
    module = experts_of(engine)[0]
    x = torch.randn(3, module.tensors.hidden).to(torch.bfloat16)
    idx = torch.tensor([[0, -1], [-2, 3], [-(1 << 40), 15]])
    masked = module(x, idx.clamp(min=-1), torch.ones(3, 2))
    assert torch.equal(module(x, idx, torch.ones(3, 2)), masked)
    assert int(module.invalid_ids) == 2
    first = module.tensors.count
    with pytest.raises(ValueError, match=f"topk_idx holds expert {first + 15}, but num_experts is {first}"):
        module(x, idx.clamp(min=-1) + first, torch.ones(3, 2))
    assert [record["invalid_ids"] for record in engine.moe_layers()] == [2 + 3, 0, 0, 0]


def test_only_kernels_of_mxfp4_experts_are_made() -> None:
    made: MoEKernel = make_moe_kernel("hopper_mega_moe")
    assert isinstance(made, HopperMegaMoE)
    with pytest.raises(ValueError, match="'deep_gemm_sm90' is no kernel of MXFP4 experts"):
        make_moe_kernel("deep_gemm_sm90")
