"""DeepSeek-V4 under the load paths beside a plain start and reload: each equals a fresh start."""

from pathlib import Path

import pytest
from deepseek_v4_engine import make_checkpoint, make_spec, start_engine
from k3_engine import NEW, OLD, different, generate, held, held_bytes, prompts

from workloads.engines.native import NativeEngine
from workloads.loading.paths import SAVED
from workloads.spec import Arrival


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory)


@pytest.mark.parametrize("via", SAVED)
def test_a_start_on_saved_files_equals_a_fresh_one(checkpoint: Path, via: str, tmp_path: Path) -> None:
    if via.startswith("tensorizer"):
        pytest.importorskip("tensorizer")
    fresh = start_engine(checkpoint, NEW)
    fresh.spec.saved_dir = str(tmp_path)
    fresh.save(NEW, via)
    spec = make_spec(checkpoint)
    spec.saved_dir = str(tmp_path)
    engine = NativeEngine(spec, 0)
    engine.start(NEW, via)
    assert different(held_bytes(engine), held_bytes(fresh)) == []
    assert generate(engine, prompts(3), 2) == generate(fresh, prompts(3), 2)
    engine.update(OLD, "direct")
    assert different(held_bytes(engine), held_bytes(start_engine(checkpoint, OLD))) == []


@pytest.mark.parametrize("via", ["layerwise", "direct", "per_expert"])
def test_buckets_in_any_order_equal_a_start_in_the_same_storage(checkpoint: Path, via: str) -> None:
    engine = start_engine(checkpoint)
    places = {path: t.data_ptr() for path, t in held(engine).items()}
    for weights in (NEW, OLD, NEW):
        engine.update(weights, via, Arrival(order="shuffled", order_seed=7, bucket_bytes=300_000))
    assert different(held_bytes(engine), held_bytes(start_engine(checkpoint, NEW))) == []
    assert {path: t.data_ptr() for path, t in held(engine).items()} == places


@pytest.mark.parametrize("via", ["layerwise", "direct"])
def test_an_update_of_one_layer_leaves_the_rest(checkpoint: Path, via: str) -> None:
    engine = start_engine(checkpoint)
    old, fresh = held_bytes(engine), held_bytes(start_engine(checkpoint, NEW))
    engine.update(NEW, via, Arrival(tensors=("layers.0.*",)))
    now = held_bytes(engine)
    changed = different(now, old)
    assert any("hc_attn_fn_broadcast" in path for path in changed)
    assert all(path.startswith("target:model.layers.0.") for path in changed)
    assert all((now[path] == fresh[path]).all() for path in now if ".layers.0." in path)


def test_the_draft_may_be_updated_apart(checkpoint: Path) -> None:
    engine = start_engine(checkpoint)
    old, fresh = held_bytes(engine), held_bytes(start_engine(checkpoint, NEW))
    engine.update(NEW, "layerwise", Arrival(roots=("target",)))
    now = held_bytes(engine)
    assert all((now[path] == old[path]).all() for path in now if path.startswith("draft:"))
    engine.update(NEW, "layerwise", Arrival(roots=("draft",)))
    assert different(held_bytes(engine), fresh) == []


def test_sleep_brings_back_what_served(checkpoint: Path) -> None:
    engine = start_engine(checkpoint)
    before = held_bytes(engine)
    engine.sleep(1)
    engine.wake()
    assert different(held_bytes(engine), before) == []
    engine.sleep(2)
    engine.wake()
    engine.update(NEW, "layerwise")
    fresh = start_engine(checkpoint, NEW)
    assert different(held_bytes(engine), held_bytes(fresh)) == []
    assert generate(engine, prompts(3), 2) == generate(fresh, prompts(3), 2)
