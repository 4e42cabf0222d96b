"""The Kimi-K3 stack under every load path: parameters equal the checkpoint, updates equal a fresh start."""

from pathlib import Path

import pytest
import torch
from k3_engine import NEW, OLD, different, generate, held, held_bytes, make_spec, prompts, start_engine

from workloads.engines.native import NativeEngine
from workloads.kernels.moe import MegaMoEReference
from workloads.loading.checkpoint import CheckpointError
from workloads.loading.generate import generate_checkpoint
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.loading.tensor_table import TensorSpec, every_tensor
from workloads.loading.weights import ModelRoot, Part, narrow
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.model import KimiK3ForCausalLM
from workloads.models.kimi_k3.mtp import KimiK3MTP
from workloads.models.kimi_k3.tensors import sections
from workloads.models.parallel import Group, RankGroups
from workloads.models.served import Setting
from workloads.spec import Checkpoint

TARGET, DRAFT = "target", "draft"


def roots_of_rank(config: KimiK3Config, tp: int, dp: int, ep: int, rank: int) -> dict[str, ModelRoot]:
    """Both models as `rank` holds them; without a process group, so they can be loaded but not run."""
    groups = RankGroups(
        world=Group(rank, tp * dp),
        tp=Group(rank % tp, tp),
        ep=Group(rank % ep, ep),
        dp_rank=rank // tp,
        dp=dp,
    )
    setting = Setting(config, groups, MegaMoEReference(), fused=True)
    return {TARGET: KimiK3ForCausalLM(setting), DRAFT: KimiK3MTP(setting)}


def parts_of(name: str, root: ModelRoot) -> list[Part]:
    return [part for path, module in root.weight_modules() for part in module.parts(f"{name}:{path}")]


@pytest.mark.parametrize(("tp", "dp", "ep"), [(1, 1, 1), (2, 1, 2), (4, 4, 16), (2, 2, 2)])
def test_parts_of_all_ranks_are_the_checkpoint(k3_checkpoint: Path, tp: int, dp: int, ep: int) -> None:
    """Every part equals its slice of the checkpoint, and the ranks of a TP group and an EP group together hold
    every element that a model reads; padding holds its creation value."""
    config = KimiK3Config()
    reader = open_view(Checkpoint(), k3_checkpoint)
    specs = {spec.name: spec for spec in every_tensor(sections(config))}
    covered = {name: torch.zeros(spec.shape, dtype=torch.bool) for name, spec in specs.items()}
    padded: set[tuple[str, float | None]] = set()
    for rank in range(max(tp, ep)):
        for name, root in roots_of_rank(config, tp, dp, ep, rank).items():
            Loader(name, root, Lifecycle()).cold(reader)
            for part in parts_of(name, root):
                if part.source is None:
                    assert (part.value == part.padding_value).all(), part.tensor
                    padded.add((part.tensor.rpartition(".")[2], part.padding_value))
                    continue
                expected = reader.slice(part.source, part.region)
                assert part.value.dtype == expected.dtype
                assert torch.equal(
                    part.value.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
                )
                narrow(covered[part.source], part.region).fill_(True)
    for name, spec in specs.items():
        assert covered[name][: spec.read].all(), name
        assert spec.read is None or not covered[name][spec.read :].any(), name
    assert padded >= {
        (f"_transformed_l{layer}_weights[{item}]", (0.0, 127.0)[item]) for layer in (1, 2) for item in (0, 1)
    }
    assert ("weight", 0.0) in padded  # rows of the fused KDA projection


@pytest.mark.parametrize("via", ["layerwise", "direct"])
@pytest.mark.parametrize("before", [OLD, "dummy"])
@pytest.mark.parametrize("kernel", ["mega_moe", "reference"])
def test_an_update_equals_a_start_in_the_same_storage(
    k3_checkpoint: Path, via: str, before: str, kernel: str
) -> None:
    how = {"via": "dummy"} if before == "dummy" else {}
    engine = start_engine(k3_checkpoint, OLD, moe_kernel=kernel, **how)
    fresh = start_engine(k3_checkpoint, NEW, moe_kernel=kernel)
    earlier, places = held_bytes(engine), {path: t.data_ptr() for path, t in held(engine).items()}
    generate(engine, prompts(3), 2)  # serving must not disturb what an update refreshes
    engine.update(NEW, via)
    assert different(held_bytes(engine), held_bytes(fresh)) == []
    assert {path: t.data_ptr() for path, t in held(engine).items()} == places
    unchanged = set(held_bytes(engine)) - set(different(held_bytes(engine), earlier))
    assert unchanged == set()


def test_updating_back_and_twice_equals_the_start(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint, OLD)
    old = held_bytes(engine)
    for checkpoint, via in ((NEW, "direct"), (NEW, "layerwise"), (OLD, "layerwise"), (OLD, "direct")):
        engine.update(checkpoint, via)
    assert different(held_bytes(engine), old) == []


def test_random_weights_serve(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint, OLD, "dummy")
    (generation,) = generate(engine, prompts(5), 3)
    assert len(generation[2]) == 3
    assert not any(t.isnan().any() for t in held(engine).values() if t.is_floating_point())


def test_the_loaded_down_projection_is_the_serving_one(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint)
    experts = engine.roots()[TARGET].get_submodule("model.layers.1.block_sparse_moe.experts")
    (loader,) = (one for name, one in engine.loaders.items() if name == TARGET)
    serving = experts._transformed_l2_weights[0].data_ptr()
    loader.restore_consumed(experts)
    assert experts.get_parameter("w2_weight").data_ptr() == serving
    assert experts.get_parameter("w13_weight").data_ptr() != experts._transformed_l1_weights[0].data_ptr()
    assert (experts.get_parameter("w13_weight") == 0xFF).all()


def test_every_load_processes_every_module_once(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint)
    for via in ("layerwise", "direct"):
        engine.update(NEW, via)
        generate(engine, prompts(3), 2)
    events = engine.lifecycle.events
    assert {e["phase"] for e in events} == {"load"}
    for name, root in engine.roots().items():
        modules = sorted(path for path, module in root.weight_modules() if module.weights)
        for load, via in enumerate(("safetensors", "layerwise", "direct")):
            mine = [e for e in events if (e["root"], e["load"]) == (name, load)]
            assert {e["via"] for e in mine} == {via}
            for step in ("post_process", "fill_padding"):
                assert sorted(e["module"] for e in mine if e["event"] == step) == modules
            for step in ("load_start", "finalize", "load_end"):
                assert sum(e["event"] == step for e in mine) == 1


def _other_config() -> KimiK3Config:
    return KimiK3Config(num_layers=3, full_attention_layers=[2], vocab_size=512)


def test_a_checkpoint_of_another_model_is_refused_untouched(k3_checkpoint: Path, tmp_path: Path) -> None:
    other = generate_checkpoint(_other_config(), 0, tmp_path / "other")
    spec = make_spec(k3_checkpoint)
    spec.checkpoints["other"], spec.checkpoint_dirs["other"] = Checkpoint(), str(other)
    engine = NativeEngine(spec, 0)
    with pytest.raises(CheckpointError, match="is missing"):
        engine.start("other", "safetensors")
    engine.start(OLD, "safetensors")
    before, events = held_bytes(engine), len(engine.lifecycle.events)
    for via in ("layerwise", "direct"):
        with pytest.raises(CheckpointError) as refusal:
            engine.update("other", via)
        problems = "\n".join(refusal.value.problems)
        assert "'language_model.lm_head.weight' has shape (512, 256), expected (1024, 256)" in problems
        assert "'language_model.model.layers.2.self_attn.kv_b_proj.weight' is unexpected" in problems
    assert different(held_bytes(engine), before) == []
    assert len(engine.lifecycle.events) == events


def test_the_stack_declares_exactly_the_checkpoint() -> None:
    config = KimiK3Config()
    specs: dict[str, TensorSpec] = {spec.name: spec for spec in every_tensor(sections(config))}
    declared = {
        placement.source
        for root in roots_of_rank(config, 1, 1, 1, 0).values()
        for _, module in root.weight_modules()
        for weight in module.weights.values()
        for placement in weight.placements
    }
    assert declared == specs.keys()
