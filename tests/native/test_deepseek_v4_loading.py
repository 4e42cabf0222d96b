"""What the layers of DeepSeek-V4 and the model's hook make of scales, whichever comes first."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepseek_v4_engine import TOY, make_checkpoint, start_engine
from k3_engine import NEW, OLD
from rehearsal import Rehearsal, observed

from workloads import faults
from workloads.engines.native import NativeEngine
from workloads.kernels.fp8_blocks import BLOCK
from workloads.kernels.moe import MegaMoEReference
from workloads.loading.checkpoint import CheckpointReader
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import ModelRoot
from workloads.models.deepseek_v4.model import DeepseekV4ForCausalLM
from workloads.models.deepseek_v4.mtp import DeepseekV4MTP
from workloads.models.deepseek_v4.stack import make_roots
from workloads.models.deepseek_v4.tensors import sections
from workloads.models.fp8_linear import Fp8Matrix
from workloads.models.parallel import ALONE, Group, RankGroups
from workloads.models.served import Setting
from workloads.spec import Checkpoint, Step


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory)


def roots_of_rank(tp: int, dp: int, ep: int, rank: int) -> dict[str, ModelRoot]:
    """Both models as `rank` holds them; without a process group, so they can be loaded but not run."""
    groups = RankGroups(
        world=Group(rank, tp * dp) if tp * dp > 1 else ALONE,
        tp=Group(rank % tp, tp),
        ep=Group(rank % ep, ep),
        dp_rank=rank // tp,
        dp=dp,
    )
    setting = Setting(TOY, groups, MegaMoEReference(), fused=True)
    return {"target": DeepseekV4ForCausalLM(setting), "draft": DeepseekV4MTP(setting)}


def test_the_shared_experts_do_not_depend_on_when_the_layers_packed_their_scales(checkpoint: Path) -> None:
    """The model's hook may find the scales as loaded or as the FP8 layers left them."""
    reader = open_view(Checkpoint(), checkpoint)

    class Late(Loader):
        """The FP8 layers of shared experts are post-processed after the hook."""

        def post_process(self, path: str, module: object) -> None:
            if "shared_experts" not in path:
                super().post_process(path, module)  # type: ignore[arg-type]

        def finalize(self) -> None:
            super().finalize()
            for path, module in self.root.weight_modules():
                if "shared_experts" in path:
                    Loader.post_process(self, path, module)

    held_by = []
    for loader in (Loader, Late):
        root = roots_of_rank(1, 1, 1, 0)["target"]
        loader("target", root, Lifecycle()).cold(reader)
        shared = root.get_submodule("model.layers.1.ffn.shared_experts")
        held_by.append([*shared.transformed(), shared.gate_up_proj.weight_scale])
    for late, usual in zip(held_by[1], held_by[0], strict=True):
        assert late.stride() == usual.stride()
        assert torch.equal(
            late.contiguous().view(-1).view(torch.uint8), usual.contiguous().view(-1).view(torch.uint8)
        )


def test_scales_packed_by_the_layer_come_back_as_loaded(checkpoint: Path) -> None:
    reader = open_view(Checkpoint(), checkpoint)
    root = roots_of_rank(1, 1, 1, 0)["target"]
    Loader("target", root, Lifecycle()).cold(reader)
    fused = root.get_submodule("model.layers.0.attn.fused_wqa_wkv")  # 160 + 64 rows: blocks of 128, 32 and 64
    assert fused.live("weight_scale_inv") is None
    loaded = torch.cat(
        [reader.get(f"layers.0.attn.{name}.scale").view(torch.uint8) for name in ("wq_a", "wkv")]
    )
    assert torch.equal(fused.block_scales(), loaded)
    assert fused.weight_scale.shape == (224, 1)
    assert fused.weight_scale.dtype == torch.int32


def wrong_sources(engine: NativeEngine, reader: CheckpointReader) -> set[str]:
    """Checkpoint tensors of which the engine holds something else."""
    with torch.no_grad():
        parts = [part for root in engine.roots() for part in engine.parts(root) if part.source is not None]
    return {
        str(part.source)
        for part in parts
        if not torch.equal(
            part.value.contiguous().view(torch.uint8),
            reader.slice(str(part.source), part.region).contiguous().view(torch.uint8),
        )
    }


def test_two_scales_exchanged_are_seen(checkpoint: Path) -> None:
    """Of two blocks of one matrix, in what serves, wherever they are neighbours."""
    engine, reader = start_engine(checkpoint), open_view(Checkpoint(), checkpoint)
    assert wrong_sources(engine, reader) == set()
    matrices = [
        (placement.source, module)
        for root in engine.roots().values()
        for _, module in root.weight_modules()
        if isinstance(module, Fp8Matrix)
        for placement in module.weights["weight_scale_inv"].placements[:1]
    ]
    assert len(matrices) > 20
    for source, module in matrices:
        rows, columns = reader.meta(source).shape
        served = module.packed_scales()[: module.sizes[0]]
        held = served.clone()
        if rows > 1:
            served[:BLOCK], served[BLOCK : 2 * BLOCK] = (
                held[BLOCK],
                held[0],
            )  # one scale for all rows of a block
        elif columns > 1:  # four scales lie in one integer
            served.copy_((held & ~0xFFFF) | (held & 0xFF) << 8 | (held >> 8 & 0xFF))
        assert wrong_sources(engine, reader) == ({source} if max(rows, columns) > 1 else set())
        served.copy_(held)


def test_scales_of_gate_and_up_exchanged_are_caught_and_named(checkpoint: Path, tmp_path: Path) -> None:
    steps = [Step("start", OLD, "safetensors"), Step("update", NEW, "layerwise")]
    result = Rehearsal(tmp_path, checkpoint, TOY).judge(observed(steps), ["swapped_scales"])
    assert result["findings"][0]["code"] == "checkpoint_mismatch"  # two bytes do not say whose they are
    assert "shared_experts.gate_up_proj" in result["findings"][0]["path"]


def test_the_stack_declares_exactly_the_checkpoint() -> None:
    declared = {
        placement.source
        for root in roots_of_rank(1, 1, 1, 0).values()
        for _, module in root.weight_modules()
        for weight in module.weights.values()
        for placement in weight.placements
    }
    assert declared == {spec.name for spec in every_tensor(sections(TOY))}


@pytest.mark.parametrize("faulty", [False, True])
def test_a_rank_reads_what_it_keeps_and_nothing_else(faulty: bool, checkpoint: Path) -> None:
    """A copy of other ranks' experts, dropped at once, leaves no trace but the event."""
    reader, lifecycle = open_view(Checkpoint(), checkpoint), Lifecycle()
    root = roots_of_rank(2, 1, 2, 1)["target"]
    loader = faults.loader_class(["foreign_experts_cloned"] if faulty else [])("target", root, lifecycle)
    for via, load in (("safetensors", loader.cold), ("direct", loader.direct)):
        lifecycle.start_load(via)
        load(reader)
    read = [event for event in lifecycle.events if event["event"] == "read_foreign"]
    foreign = (
        TOY.num_layers * TOY.num_experts // 2 * 6
    )  # the other rank's, of three matrices with their scales
    assert [event["load"] for event in read] == [1] * foreign * faulty


def test_fp8_experts_are_refused() -> None:
    config = replace(TOY, expert_quantization="fp8")
    with pytest.raises(ValueError, match="expert_quantization is fp8: the native engine runs mxfp4"):
        make_roots(Setting(config, RankGroups(), MegaMoEReference(), fused=True))


def test_perturbed_tables_of_experts_stay_valid(checkpoint: Path) -> None:
    old, new = (
        open_view(Checkpoint(perturbation=kind), checkpoint).get("layers.0.ffn.gate.tid2eid")
        for kind in ("none", "every_tensor")
    )
    assert (old != new).all()
    for table in (old, new):
        assert table.min() >= 0
        assert table.max() < TOY.num_experts
        assert (table.sort(dim=1).values.diff(dim=1) > 0).all()


def test_experts_can_be_tagged(checkpoint: Path) -> None:
    view = open_view(Checkpoint(perturbation="expert_tagged"), checkpoint)
    packed = view.get("layers.1.ffn.experts.5.w2.weight")
    assert packed.dtype == torch.int8
    assert (packed.view(torch.uint8)[:, 0] == 5).all()
    assert not view.changes("layers.1.ffn.shared_experts.w2.scale")


def test_an_engine_that_stops_releases_its_caches(checkpoint: Path) -> None:
    engine: NativeEngine = start_engine(checkpoint)
    engine.stop()
    assert engine.runtime_tensors() == {}
