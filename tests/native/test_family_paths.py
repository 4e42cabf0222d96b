"""Every family of models under the load paths beside a plain start and reload: each equals a fresh start.

Kimi-K3 is looked at more closely in test_load_paths.py.
"""

import re
from pathlib import Path

import pytest
from families import NEW, OLD, TOYS, fresh, start_toy, table_of, toy_spec
from k3_engine import different, generate, held, held_bytes

from workloads.engines.native import NativeEngine
from workloads.loading.paths import SAVED, UPDATES
from workloads.loading.tensor_table import every_tensor
from workloads.spec import Arrival

every_toy = pytest.mark.parametrize("name", [name for name in TOYS if name != "kimi_k3"])


@every_toy
def test_a_start_on_saved_files_equals_a_fresh_one(name: str, tmp_path: Path) -> None:
    fresh_engine = start_toy(name, NEW)
    for via in SAVED:
        if via.startswith("tensorizer"):
            pytest.importorskip("tensorizer")
        fresh_engine.spec.saved_dir = str(tmp_path / via)
        fresh_engine.save(NEW, via)
        spec = toy_spec(name)
        spec.saved_dir = fresh_engine.spec.saved_dir
        engine = NativeEngine(spec, 0)
        engine.start(NEW, via)
        assert different(held_bytes(engine), fresh(name, NEW).held) == [], via
        assert generate(engine, TOYS[name].given, 2) == fresh(name, NEW).said, via
        engine.update(OLD, "direct")
        assert different(held_bytes(engine), fresh(name, OLD).held) == [], via


@every_toy
@pytest.mark.parametrize("via", UPDATES)
def test_buckets_in_any_order_equal_a_start_in_the_same_storage(name: str, via: str) -> None:
    engine = start_toy(name, via="streamed")
    assert different(held_bytes(engine), fresh(name, OLD).held) == []
    places = {path: t.data_ptr() for path, t in held(engine).items()}
    for weights, order in ((NEW, "shuffled"), (OLD, "reversed"), (NEW, "natural")):
        engine.update(weights, via, Arrival(order=order, order_seed=7, bucket_bytes=300_000))
        assert different(held_bytes(engine), fresh(name, weights).held) == []
    assert {path: t.data_ptr() for path, t in held(engine).items()} == places


@every_toy
@pytest.mark.parametrize("via", UPDATES)
def test_an_update_of_one_layer_leaves_the_rest(name: str, via: str) -> None:
    engine = start_toy(name)
    names = (spec.name for spec in every_tensor(table_of(name)))
    first_layer = next(
        found[1] for key in names if (found := re.match(r"(.*layers\.0\.)(self_)?attn\.", key))
    )
    engine.update(NEW, via, Arrival(tensors=(f"{first_layer}*",)))
    now = held_bytes(engine)
    changed = different(now, fresh(name, OLD).held)
    assert changed
    assert all(".layers.0." in path and path.startswith("target:") for path in changed)
    assert not set(changed) & set(different(now, fresh(name, NEW).held))
    rest = {path for path in now if ".layers.0." in path and path.startswith("target:")} - set(changed)
    assert [path for path in rest if not path.endswith(TOYS[name].constant or "-")] == []


@pytest.mark.parametrize("name", [name for name, toy in TOYS.items() if toy.drafter])
def test_the_draft_may_be_updated_apart(name: str) -> None:
    engine = start_toy(name)
    old = held_bytes(engine)
    engine.update(NEW, "layerwise", Arrival(roots=("target",)))
    assert not any(path.startswith("draft:") for path in different(held_bytes(engine), old))
    engine.update(NEW, "layerwise", Arrival(roots=("draft",)))
    assert different(held_bytes(engine), fresh(name, NEW).held) == []


@every_toy
def test_sleep_brings_back_what_served(name: str) -> None:
    engine = start_toy(name)
    engine.sleep(1)
    engine.wake()
    assert different(held_bytes(engine), fresh(name, OLD).held) == []
    engine.sleep(2)
    engine.wake()
    engine.update(NEW, "layerwise")
    assert different(held_bytes(engine), fresh(name, NEW).held) == []
    assert generate(engine, TOYS[name].given, 2) == fresh(name, NEW).said
