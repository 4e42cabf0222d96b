"""DSpark drafters under every load path: each equals a fresh start, in the same storage, its joined copies included."""

from pathlib import Path

import pytest
import torch
from dspark_engine import CONSTANT, GIVEN, NEW, OLD, TOYS, checkpoint, fresh, spec_of, start
from family_engine import family, parts_of, roots_of_rank
from k3_engine import different, generate, held, held_bytes

from collectors.classify import classifier
from collectors.walk import walk
from workloads.engines.native import NativeEngine
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.paths import SAVED, UPDATES
from workloads.loading.perturb import open_view
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import narrow
from workloads.models.architectures import tensor_table
from workloads.models.kimi_k3.dspark import KimiK3DSpark
from workloads.spec import Arrival, Checkpoint

every_toy = pytest.mark.parametrize("name", TOYS)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def places(engine: NativeEngine) -> dict[str, int]:
    return {path: tensor.data_ptr() for path, tensor in held(engine).items()}


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2), (2, 4)])
@every_toy
def test_parts_of_all_ranks_are_the_checkpoint(name: str, tp: int, ep: int) -> None:
    config, reader = TOYS[name], open_view(Checkpoint(), checkpoint(name))
    specs = {spec.name: spec for spec in every_tensor(tensor_table(family(config)).sections(config))}
    covered = {key: torch.zeros(spec.shape, dtype=torch.bool) for key, spec in specs.items()}
    for rank in range(max(tp, ep)):
        for root, model in roots_of_rank(config, tp, ep, rank).items():
            Loader(root, model, Lifecycle()).cold(reader)
            for part in parts_of(root, model):
                if part.source is not None:
                    assert torch.equal(raw(part.value), raw(reader.slice(part.source, part.region)))
                    narrow(covered[part.source], part.region).fill_(True)
    assert [key for key, spec in specs.items() if not covered[key][: spec.read].all()] == []


@pytest.mark.parametrize("before", ["safetensors", "dummy"])
@every_toy
def test_every_update_equals_a_start_in_the_same_storage(name: str, before: str) -> None:
    engine = start(name, OLD, before)
    started, at = held_bytes(engine), places(engine)
    generate(engine, GIVEN[:1], 1)  # serving must not disturb what an update refreshes
    for number, via in enumerate(UPDATES):
        weights = (NEW, OLD)[number % 2]
        engine.update(weights, via, Arrival(order="shuffled", order_seed=number, bucket_bytes=600_000))
        assert different(held_bytes(engine), fresh(name, weights)[0]) == [], via
        unchanged = set(started) - set(different(held_bytes(engine), started))
        if weights == NEW:
            assert [path for path in unchanged if not path.endswith(CONSTANT)] == []
    assert places(engine) == at
    assert generate(engine, GIVEN, 3) == fresh(name, weights)[1]


@every_toy
def test_the_drafter_is_updated_in_a_transaction_of_its_own(name: str) -> None:
    """Embedding and head are the target's: they come with it."""
    engine, old = start(name), fresh(name, OLD)[0]
    engine.update(NEW, "direct", Arrival(roots=("target",)))
    assert not any(path.startswith("draft:") for path in different(held_bytes(engine), old))
    said = generate(engine, GIVEN, 3)
    assert [one[:4] for one in said] == [one[:4] for one in fresh(name, NEW)[1]]
    assert said != fresh(name, NEW)[1]
    engine.update(NEW, "layerwise", Arrival(roots=("draft",)))
    assert different(held_bytes(engine), fresh(name, NEW)[0]) == []
    assert generate(engine, GIVEN, 3) == fresh(name, NEW)[1]


@pytest.mark.parametrize("via", UPDATES)
def test_an_update_of_one_layer_refreshes_what_is_joined_of_all(via: str) -> None:
    engine = start("kimi_k3")
    before = held_bytes(engine)
    engine.update(NEW, via, Arrival(tensors=("layers.1.*",)))
    changed = different(held_bytes(engine), before)
    outside = [path for path in changed if not path.startswith("draft:layers.1.")]
    assert outside == [
        f"draft:context_proj.{name}" for name in ("_context_kv_norm_weights", "context_kv_proj")
    ]
    draft = engine.roots()["draft"]
    assert isinstance(draft, KimiK3DSpark)
    joined = draft.context_proj.context_kv_proj
    assert joined is not None
    rows = [layer.self_attn.kv_rows() for layer in draft._layers()]
    assert torch.equal(joined, torch.cat(rows))


@every_toy
def test_saved_state_and_sleep_bring_back_what_served(name: str, tmp_path: Path) -> None:
    writer = start(name, NEW)
    for via in SAVED:
        if via.startswith("tensorizer"):
            pytest.importorskip("tensorizer")
        writer.spec.saved_dir = str(tmp_path / via)
        writer.save(NEW, via)
        spec = spec_of(name)
        spec.saved_dir = writer.spec.saved_dir
        engine = NativeEngine(spec, 0)
        engine.start(NEW, via)
        assert different(held_bytes(engine), fresh(name, NEW)[0]) == [], via
    engine.sleep(1)
    engine.wake()
    assert different(held_bytes(engine), fresh(name, NEW)[0]) == []
    engine.sleep(2)
    engine.wake()
    engine.update(OLD, "layerwise")
    assert different(held_bytes(engine), fresh(name, OLD)[0]) == []
    assert generate(engine, GIVEN, 3) == fresh(name, OLD)[1]


@every_toy
def test_every_tensor_beside_the_parameters_has_a_rule(name: str) -> None:
    engine = start(name)
    generate(engine, GIVEN[:2], 2)
    classify = classifier(engine.rules(), set())
    found = walk(engine.roots())
    assert [one.path for one in found if classify(one).name == "unclassified"] == []
    shared = {alias for one in found if one.root == "target" for alias in one.aliases}
    assert {"draft:embed_tokens.weight", "draft:lm_head.weight"} <= shared


def test_a_random_start_joins_what_its_layers_hold() -> None:
    """Where the joined projection is a parameter, a random start gives it values that no layer has."""
    draft = start("kimi_k3", OLD, "dummy").roots()["draft"]
    assert isinstance(draft, KimiK3DSpark)
    joined = draft.context_proj.context_kv_proj
    assert joined is not None
    assert torch.equal(joined, torch.cat([layer.self_attn.kv_rows() for layer in draft._layers()]))
