"""Families built on the ordinary decoder under every load path: equal to the checkpoint, and to a fresh start."""

from pathlib import Path

import pytest
import torch
from dense_families import MEDIA, VARIANTS, checkpoint
from family_engine import family, parts_of, roots_of_rank, start_engine
from k3_engine import NEW, OLD, different, generate, held, held_bytes, prompts

from collectors.classify import classifier
from collectors.walk import walk
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import narrow
from workloads.models.architectures import tensor_table
from workloads.spec import Checkpoint

CONSTANT = ("inv_freq", "pos_embed")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@every_variant
@pytest.mark.parametrize("via", ["layerwise", "direct"])
@pytest.mark.parametrize("before", ["safetensors", "dummy"])
def test_an_update_equals_a_start_in_the_same_storage(
    folder: Path, variant: str, via: str, before: str
) -> None:
    where, config = checkpoint(folder, variant), VARIANTS[variant]
    engine, fresh = start_engine(where, config, OLD, before), start_engine(where, config, NEW)
    places = {path: t.data_ptr() for path, t in held(engine).items()}
    started = held_bytes(engine)
    generate(engine, [MEDIA], 2)  # serving must not disturb what an update refreshes
    for _ in range(2):  # the second time changes nothing
        engine.update(NEW, via)
        assert different(held_bytes(engine), held_bytes(fresh)) == []
        assert {path: t.data_ptr() for path, t in held(engine).items()} == places
    unchanged = set(started) - set(different(held_bytes(engine), started))
    assert all(path.endswith(CONSTANT) for path in unchanged)
    engine.update(OLD, via)
    streamed = start_engine(where, config, OLD, "streamed")
    assert different(held_bytes(engine), held_bytes(streamed)) == []


@every_variant
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 4), (4, 1)])
def test_parts_of_all_ranks_are_the_checkpoint(folder: Path, variant: str, tp: int, ep: int) -> None:
    """Every part equals its slice, and the ranks together hold every element: no byte of the checkpoint is lost, and
    the models declare no tensor that it lacks. None of these families pads anything."""
    config = VARIANTS[variant]
    reader = open_view(Checkpoint(), checkpoint(folder, variant))
    specs = {spec.name: spec for spec in every_tensor(tensor_table(family(config)).sections(config))}
    covered = {name: torch.zeros(spec.shape, dtype=torch.bool) for name, spec in specs.items()}
    for rank in range(max(tp, ep)):
        for name, root in roots_of_rank(config, tp, ep, rank).items():
            Loader(name, root, Lifecycle()).cold(reader)
            for part in parts_of(name, root):
                assert part.source is not None, f"{part.tensor} has padding"
                assert torch.equal(part.value, reader.slice(part.source, part.region)), part.name
                narrow(covered[part.source], part.region).fill_(True)
    assert [name for name, whole in covered.items() if not whole.all()] == []


@every_variant
def test_every_tensor_beside_the_parameters_has_a_rule(folder: Path, variant: str) -> None:
    engine = start_engine(checkpoint(folder, variant), VARIANTS[variant])
    generate(engine, [MEDIA], 2)
    classify = classifier(engine.rules(), set())
    assert [f.path for f in walk(engine.roots()) if classify(f).name == "unclassified"] == []
    constants = {f.path for f in walk(engine.roots()) if classify(f).name == "constant"}
    assert all(path.endswith(CONSTANT) for path in constants if not path.startswith("global:"))


@every_variant
def test_random_weights_serve(folder: Path, variant: str) -> None:
    engine = start_engine(checkpoint(folder, variant), VARIANTS[variant], OLD, "dummy")
    assert all(len(generation[2]) == 3 for generation in generate(engine, [*prompts(5), MEDIA], 3))
    assert [path for path, t in held(engine).items() if t.is_floating_point() and t.isnan().any()] == []


@every_variant
def test_every_load_processes_every_module_and_calls_every_hook_once(folder: Path, variant: str) -> None:
    engine = start_engine(checkpoint(folder, variant), VARIANTS[variant])
    for via in ("layerwise", "direct"):
        engine.update(NEW, via)
        generate(engine, prompts(3), 2)
    events = engine.lifecycle.events
    assert {e["phase"] for e in events} == {"load"}
    for name, root in engine.roots().items():
        modules = sorted(path for path, module in root.weight_modules() if module.weights)
        for load in range(3):
            mine = [e for e in events if (e["root"], e["load"]) == (name, load)]
            for step in ("post_process", "fill_padding"):
                assert sorted(e["module"] for e in mine if e["event"] == step) == modules
            assert sum(e["event"] == "finalize" for e in mine) == 1
