"""Every family of models: what is loaded is the checkpoint, and an update equals a fresh start."""

from collections.abc import Iterator

import pytest
import torch
from families import NEW, OLD, TOYS, checkpoint, fresh, start_toy, table_of
from family_engine import parts_of, roots_of_rank
from k3_engine import different, generate, held, held_bytes

from collectors.classify import classifier
from collectors.walk import walk
from workloads.engines.native import NativeEngine
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import Part, narrow
from workloads.spec import Checkpoint

KERNELS = [(name, kernel) for name, toy in TOYS.items() for kernel in toy.kernels]
every_toy = pytest.mark.parametrize("name", TOYS)


def loaded_parts(name: str, tp: int, ep: int, kernel: str) -> Iterator[Part]:
    """Of all ranks that hold different shares, each started by itself."""
    config, reader = TOYS[name].config, open_view(Checkpoint(), checkpoint(name))
    for rank in range(max(tp, ep)):
        for root, model in roots_of_rank(config, tp, ep, rank, kernel).items():
            Loader(root, model, Lifecycle()).cold(reader)
            yield from parts_of(root, model)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@every_toy
def test_parts_of_all_ranks_are_the_checkpoint(name: str) -> None:
    """In every layout, every part equals its slice, all ranks together hold every element that the model reads, and
    padding holds its creation value."""
    toy, reader = TOYS[name], open_view(Checkpoint(), checkpoint(name))
    specs = {spec.name: spec for spec in every_tensor(table_of(name))}
    padded = set()
    for tp, ep in sorted({(1, 1), *((tp, ep) for tp, _, ep in toy.layouts)}):
        covered = {key: torch.zeros(spec.shape, dtype=torch.bool) for key, spec in specs.items()}
        for part in loaded_parts(name, tp, ep, toy.kernels[0]):
            if part.source is None:
                assert part.padding_value is not None
                assert (part.value.float() == part.padding_value).all(), part.tensor
                padded.add((part.tensor.rpartition(".")[2], part.padding_value))
                continue
            expected = reader.slice(part.source, part.region)
            assert part.value.shape == expected.shape, part.source
            assert torch.equal(raw(part.value), raw(expected)), (part.source, tp, ep)
            narrow(covered[part.source], part.region).fill_(True)
        for key, spec in specs.items():
            read, unread = (
                (covered[key], None) if spec.read is None else covered[key].tensor_split([spec.read])
            )
            assert read.all(), (key, tp, ep)
            assert unread is None or not unread.any(), (key, tp, ep)
    assert padded == toy.padding


@pytest.mark.parametrize("via", ["layerwise", "direct"])
@pytest.mark.parametrize("before", ["safetensors", "dummy"])
@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_an_update_equals_a_start_in_the_same_storage(name: str, kernel: str, before: str, via: str) -> None:
    """Once, repeated, and back; after random weights too, which serve without a NaN."""
    toy = TOYS[name]
    engine = start_toy(name, OLD, before, moe_kernel=kernel)
    started, places = held_bytes(engine), {path: t.data_ptr() for path, t in held(engine).items()}
    said = generate(engine, toy.given, 2)  # serving must not disturb what an update refreshes
    if before == "dummy":
        assert not any(t.float().isnan().any() for t in held(engine).values() if t.is_floating_point())
        assert all(len(generation[2]) == 2 for generation in said)
    for _ in range(2):
        engine.update(NEW, via)
        assert different(held_bytes(engine), fresh(name, NEW, kernel).held) == []
    assert {path: t.data_ptr() for path, t in held(engine).items()} == places
    unchanged = set(started) - set(different(held_bytes(engine), started))
    assert [path for path in unchanged if not path.endswith(toy.constant or "-")] == []
    assert generate(engine, toy.given, 2) == fresh(name, NEW, kernel).said
    engine.update(OLD, via)
    assert different(held_bytes(engine), fresh(name, OLD, kernel).held) == []


@every_toy
def test_every_load_processes_every_module_and_calls_every_hook_once(name: str) -> None:
    engine = start_toy(name)
    for via in ("layerwise", "direct"):
        engine.update(NEW, via)
        generate(engine, TOYS[name].given[:1], 1)
    assert {event["phase"] for event in engine.lifecycle.events} == {"load"}
    for load, via in enumerate(("safetensors", "layerwise", "direct")):
        assert_processed_once(engine, load, via)


def assert_processed_once(engine: NativeEngine, load: int, via: str) -> None:
    for name, root in engine.roots().items():
        modules = {path for path, module in root.weight_modules() if module.weights}
        mine = [e for e in engine.lifecycle.events if (e["root"], e["load"]) == (name, load)]
        assert {e["via"] for e in mine} == {via}
        for step in ("post_process", "fill_padding"):
            processed = [e["module"] for e in mine if e["event"] == step]
            assert len(processed) == len(set(processed))
            assert set(processed) >= modules
        for step in ("load_start", "finalize", "load_end"):
            assert sum(e["event"] == step for e in mine) == 1


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_every_tensor_beside_the_parameters_has_a_rule(name: str, kernel: str) -> None:
    engine = start_toy(name, moe_kernel=kernel)
    generate(engine, TOYS[name].given, 2)
    classify = classifier(engine.rules(), set())
    found = {f.path: classify(f).name for f in walk(engine.roots())}
    assert [path for path, kind in found.items() if kind == "unclassified"] == []
    constants = {
        path for path, kind in found.items() if kind == "constant" and not path.startswith("global:")
    }
    assert {path for path in constants if not path.endswith(TOYS[name].constant or "-")} == set()
