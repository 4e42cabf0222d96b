"""Layers that are wrapped for adapters keep what a checkpoint knows of them, under paths that it does not know."""

import pytest
import torch
from family_engine import parts_of
from k3_engine import NEW, OLD, different, generate, held_bytes, prompts
from qwen3_engine import qwen3_spec, start_qwen3

from collectors.classify import classifier
from collectors.walk import walk
from workloads.engines.native import NativeEngine
from workloads.loading.perturb import open_view
from workloads.models.adapters import WithAdapter

GIVEN = prompts(1, 7)
NAMES = ["dense_fp8", "moe_bf16"]


def wrapped(name: str, weights: str) -> NativeEngine:
    engine = NativeEngine(qwen3_spec(name, lora_rank=4), 0)
    engine.start(weights, "safetensors")
    return engine


@pytest.mark.parametrize("name", NAMES)
def test_a_reload_reaches_what_is_wrapped(name: str) -> None:
    """It says what a model without wrappers says, and holds what a fresh start holds, adapters included."""
    engine, fresh = wrapped(name, OLD), wrapped(name, NEW)
    assert generate(engine, GIVEN) == generate(start_qwen3(name), GIVEN)
    expected = generate(start_qwen3(name, NEW), GIVEN)
    for via in ("layerwise", "direct"):
        engine.update(NEW, via)
        assert different(held_bytes(engine), held_bytes(fresh)) == []
        assert generate(engine, GIVEN) == expected
        engine.update(OLD, via)
    engine.sleep(2)
    engine.wake()
    engine.update(NEW, "layerwise")
    assert different(held_bytes(engine), held_bytes(fresh)) == []


@pytest.mark.parametrize("name", NAMES)
def test_paths_have_a_base_layer_and_sources_do_not(name: str) -> None:
    engine = wrapped(name, OLD)
    reader = open_view(engine.spec.checkpoints[OLD], engine.spec.checkpoint_dirs[OLD])
    parts = [part for part in parts_of("target", engine.roots()["target"]) if part.source is not None]
    inner = [part for part in parts if ".base_layer." in part.tensor]
    linears = 4 if name == "dense_fp8" else 2
    wrappers = [one for one in engine.roots()["target"].modules() if isinstance(one, WithAdapter)]
    assert len(wrappers) == 2 * linears, "of two layers; experts are left as they are"
    assert inner
    assert not any("base_layer" in (part.source or "") for part in parts)
    assert {part.source for part in parts} == set(reader.names())
    assert all(
        torch.equal(
            part.value.view(torch.uint8), reader.slice(part.source or "", part.region).view(torch.uint8)
        )
        for part in inner
        if part.source is not None and part.source.endswith("proj.weight")
    )


def test_every_tensor_of_a_wrapper_has_a_class() -> None:
    engine = wrapped("dense_fp8", OLD)
    classify = classifier(engine.rules(), set())
    adapters = [found for found in walk(engine.roots()) if ".lora_" in found.path]
    assert len(adapters) == 2 * 8
    assert {classify(found).name for found in adapters} == {"constant"}
    assert not any(found.tensor.any() for found in adapters)
