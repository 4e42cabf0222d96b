"""What is particular to loading Kimi-K3: the storage of its experts, and a checkpoint of another model."""

from pathlib import Path

import pytest
from k3_engine import OLD, different, held_bytes, make_spec, start_engine

from workloads.engines.native import NativeEngine
from workloads.loading.checkpoint import CheckpointError
from workloads.loading.generate import generate_checkpoint
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import Checkpoint

TARGET, DRAFT = "target", "draft"


def test_the_loaded_down_projection_is_the_serving_one(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint)
    experts = engine.roots()[TARGET].get_submodule("model.layers.1.block_sparse_moe.experts")
    (loader,) = (one for name, one in engine.loaders.items() if name == TARGET)
    serving = experts._transformed_l2_weights[0].data_ptr()
    loader.restore_consumed(experts)
    assert experts.get_parameter("w2_weight").data_ptr() == serving
    assert experts.get_parameter("w13_weight").data_ptr() != experts._transformed_l1_weights[0].data_ptr()
    assert (experts.get_parameter("w13_weight") == 0xFF).all()


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
