"""Qwen3 under the load paths beside a plain start and reload: each equals a fresh start."""

from pathlib import Path

import pytest
from k3_engine import different, generate, held, held_bytes, prompts
from qwen3_engine import CONFIGS, NEW, OLD, SPARSE, qwen3_spec, start_qwen3

from workloads.engines.native import NativeEngine
from workloads.loading.experts import takes_single_experts
from workloads.loading.paths import SAVED
from workloads.spec import Arrival

every_kind = pytest.mark.parametrize("name", list(CONFIGS))


@every_kind
@pytest.mark.parametrize("via", SAVED)
def test_a_start_on_saved_files_equals_a_fresh_one(name: str, via: str, tmp_path: Path) -> None:
    if via.startswith("tensorizer"):
        pytest.importorskip("tensorizer")
    fresh = start_qwen3(name, NEW)
    fresh.spec.saved_dir = str(tmp_path)
    fresh.save(NEW, via)
    spec = qwen3_spec(name)
    spec.saved_dir = str(tmp_path)
    engine = NativeEngine(spec, 0)
    engine.start(NEW, via)
    assert different(held_bytes(engine), held_bytes(fresh)) == []
    assert generate(engine, prompts(3), 1) == generate(fresh, prompts(3), 1)
    engine.update(OLD, "direct")
    assert different(held_bytes(engine), held_bytes(start_qwen3(name))) == []


@every_kind
@pytest.mark.parametrize("via", ["layerwise", "direct", "per_expert"])
def test_buckets_in_any_order_equal_a_start_in_the_same_storage(name: str, via: str) -> None:
    engine = start_qwen3(name)
    places = {path: t.data_ptr() for path, t in held(engine).items()}
    for weights in (NEW, OLD, NEW):
        engine.update(weights, via, Arrival(order="shuffled", order_seed=7, bucket_bytes=200_000))
    assert different(held_bytes(engine), held_bytes(start_qwen3(name, NEW))) == []
    assert {path: t.data_ptr() for path, t in held(engine).items()} == places


@pytest.mark.parametrize("name", SPARSE)
def test_experts_arrive_one_at_a_time(name: str) -> None:
    modules = start_qwen3(name).roots()["target"].get_submodule("model.layers.0.mlp.experts")
    assert all(takes_single_experts(module) for module in (modules.w13, modules.w2))


@every_kind
@pytest.mark.parametrize("via", ["layerwise", "direct"])
def test_an_update_of_one_layer_leaves_the_rest(name: str, via: str) -> None:
    engine, old = start_qwen3(name), start_qwen3(name)
    engine.update(NEW, via, Arrival(tensors=("model.layers.1.*",)))
    changed = different(held_bytes(engine), held_bytes(old))
    assert changed
    assert all(path.startswith("target:model.layers.1.") for path in changed)
    fresh = held_bytes(start_qwen3(name, NEW))
    now = held_bytes(engine)
    assert all((now[path] == fresh[path]).all() for path in now if ".layers.1." in path)


@every_kind
def test_sleep_brings_back_what_served(name: str) -> None:
    engine = start_qwen3(name)
    before = held_bytes(engine)
    engine.sleep(1)
    engine.wake()
    assert different(held_bytes(engine), before) == []
    engine.sleep(2)
    engine.wake()
    engine.update(NEW, "layerwise")
    assert different(held_bytes(engine), held_bytes(start_qwen3(name, NEW))) == []
    assert generate(engine, prompts(3), 1) == generate(start_qwen3(name, NEW), prompts(3), 1)
