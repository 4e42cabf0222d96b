"""What DeepSeek-V4 says depends on what is derived from its weights; of the vision wrapper, also on images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepseek_v4_engine import TOY, make_checkpoint, make_spec, start_engine
from k3_engine import NEW, OLD, different, generate, held_bytes, prompts

from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.loading.generate import generate_checkpoint
from workloads.models.deepseek_v4.mhc import HyperConnection
from workloads.models.deepseek_v4.moe import Gate, SharedExperts
from workloads.models.vision import VisionWrapper


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory)


def _stale_broadcast(now: torch.nn.Module, before: torch.nn.Module) -> bool:
    if not isinstance(now, HyperConnection) or not isinstance(before, HyperConnection):
        return False
    if now.hc_attn_fn_broadcast is None or before.hc_attn_fn_broadcast is None:
        return False
    now.hc_attn_fn_broadcast.copy_(before.hc_attn_fn_broadcast)
    return True


def _stale_shared(now: torch.nn.Module, before: torch.nn.Module) -> bool:
    if not isinstance(now, SharedExperts) or not isinstance(before, SharedExperts):
        return False
    for held, old in zip(now.transformed() or (), before.transformed() or (), strict=True):
        held.copy_(old)
    return True


def _other_table(now: torch.nn.Module, before: torch.nn.Module) -> bool:
    if not isinstance(now, Gate) or not now.hashed:
        return False
    now.tid2eid.copy_(now.tid2eid ^ 1)
    return True


@pytest.mark.parametrize("stale", [_stale_broadcast, _stale_shared, _other_table])
def test_generations_depend_on_what_only_the_hook_builds_and_on_the_table_of_experts(
    checkpoint: Path, stale: object
) -> None:
    assert callable(stale)
    engine, old = start_engine(checkpoint, NEW), start_engine(checkpoint, OLD)
    right = generate(engine, prompts(20), 2)
    modules = zip(engine.roots()["target"].modules(), old.roots()["target"].modules(), strict=True)
    replaced = sum([stale(now, before) for now, before in modules])
    assert replaced in (1, TOY.num_layers)
    assert generate(engine, prompts(20), 2) != right


def test_what_the_hook_did_not_build_is_refused(checkpoint: Path) -> None:
    engine = start_engine(checkpoint)
    target = engine.roots()["target"]
    connection = target.get_submodule("model.layers.0.hc_attn")
    held, connection.hc_attn_fn_broadcast = connection.hc_attn_fn_broadcast, None
    with pytest.raises(RuntimeError, match="hc_attn_fn_broadcast does not exist"):
        generate(engine, prompts(3))
    connection.hc_attn_fn_broadcast = held
    target.get_submodule("model.layers.1.ffn.shared_experts")._shared_l1_weights = None
    with pytest.raises(RuntimeError, match="shared experts are not finalised"):
        generate(engine, prompts(3))
    target.get_submodule("model.layers.0.attn.wq_b").weight_scale = None
    with pytest.raises(RuntimeError, match="FP8 scales are not packed"):
        generate(engine, prompts(3))


def test_the_vision_wrapper_delegates_its_hook_and_puts_features_in_place_of_image_tokens(
    tmp_path: Path, checkpoint: Path
) -> None:
    """The wrapper loads the text model under the same names, its projector beside it."""
    config = replace(TOY, vision=True)
    spec = make_spec(generate_checkpoint(config, 0, tmp_path / "checkpoint"))
    spec.model.deepseek_v4 = config
    engine = NativeEngine(spec, 0)
    engine.start(OLD, "safetensors")
    wrapper = engine.roots()["target"]
    assert isinstance(wrapper, VisionWrapper)
    text = start_engine(checkpoint)
    assert wrapper.language_model.model.layers["0"].hc_attn.hc_attn_fn_broadcast is not None
    assert generate(engine, prompts(20), 2) == generate(text, prompts(20), 2)  # no image in it
    second = config.image_token_start + config.image_lengths[0]
    image = [Prompt("image", (1, 2, second, second + 1, 3))]
    assert generate(engine, image, 2) != generate(text, image, 2)
    engine.update(NEW, "layerwise")
    fresh = NativeEngine(spec, 0)
    fresh.start(NEW, "safetensors")
    assert different(held_bytes(engine), held_bytes(fresh)) == []


def test_requests_longer_than_the_rotation_tables_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 9000 and .*max_position_embeddings 8192"):
        start_engine(checkpoint, max_model_len=9000)
