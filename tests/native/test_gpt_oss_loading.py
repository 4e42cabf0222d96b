"""gpt-oss under every load path: an update equals a start, padding included, and nothing beside parameters moves."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from gpt_oss_engine import (
    CONFIGS,
    EXPERTS,
    PARAMETERS,
    TOY,
    is_filled,
    parts_of,
    start_engine,
    write_layouts,
)
from k3_engine import NEW, OLD, different, generate, held, held_bytes, prompts

from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.models.gpt_oss.config import CHECKPOINT_LAYOUTS
from workloads.models.gpt_oss.moe import RoutedExperts
from workloads.models.gpt_oss.stack import RULES
from workloads.spec import Checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_layouts(tmp_path_factory.mktemp("gpt_oss"))


@pytest.mark.parametrize("via", ["layerwise", "direct"])
@pytest.mark.parametrize("before", [OLD, "dummy"])
@pytest.mark.parametrize("layout", CHECKPOINT_LAYOUTS)
def test_an_update_equals_a_start_in_the_same_storage(
    checkpoints: dict[str, Path], via: str, before: str, layout: str
) -> None:
    config, folder = CONFIGS[layout], checkpoints[layout]
    engine = start_engine(folder, OLD, "dummy" if before == "dummy" else "safetensors", config)
    fresh = start_engine(folder, NEW, config=config)
    earlier, places = held_bytes(engine), {path: t.data_ptr() for path, t in held(engine).items()}
    generate(engine, prompts(3), 2)  # serving must not disturb what an update refreshes
    engine.update(NEW, via)
    assert different(held_bytes(engine), held_bytes(fresh)) == []
    assert {path: t.data_ptr() for path, t in held(engine).items()} == places
    unchanged = set(held_bytes(engine)) - set(different(held_bytes(engine), earlier))
    assert {path for path in unchanged if "gemm1" not in path and "inv_freq" not in path} == set()
    assert generate(engine, prompts(9)) == generate(fresh, prompts(9))


def test_updating_back_and_twice_equals_the_start(checkpoints: dict[str, Path]) -> None:
    engine = start_engine(checkpoints["combined"])
    old = held_bytes(engine)
    for checkpoint, via in ((NEW, "direct"), (NEW, "layerwise"), (OLD, "layerwise"), (OLD, "direct")):
        engine.update(checkpoint, via)
    assert different(held_bytes(engine), old) == []


@pytest.mark.parametrize("via", ["layerwise", "direct"])
def test_padding_that_is_not_filled_ends_up_in_the_layout_whatever_the_answers_say(
    checkpoints: dict[str, Path], via: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reload without the fill leaves: of every expert parameter, wherever its padding lands after shuffling."""
    engine, fresh = (start_engine(checkpoints["combined"], name) for name in (OLD, NEW))
    monkeypatch.setattr(Loader, "fill", lambda *_: None)
    engine.update(NEW, via)
    wrong = set(different(held_bytes(engine), held_bytes(fresh)))
    assert wrong == {f"target:model.layers.{n}.mlp.experts.{name}" for n in (0, 1) for name in PARAMETERS}
    same_answers = generate(engine, prompts(9)) == generate(fresh, prompts(9))
    assert same_answers == (
        via == "direct"
    )  # where old numbers meet zero weights; only poison cannot be missed
    parts = parts_of(engine.roots()["target"])
    padding = [part for part in parts if part.source is None]
    assert {part.tensor for part in padding if not is_filled(part)} == wrong
    reader = open_view(Checkpoint(perturbation="every_tensor"), checkpoints["combined"])
    for part in parts:  # nothing but padding is wrong
        assert part.source is None or torch.equal(part.value, reader.slice(part.source, part.region))
    name = f"target:{EXPERTS}.w2_bias"
    ours, theirs = held(engine)[name], held(fresh)[name]
    rows = (ours[0].view(torch.int16) != theirs[0].view(torch.int16)).nonzero().flatten().tolist()
    assert {row % 32 // 8 for row in rows} == {3}  # 32 padded rows of 128, eight in each quarter of the tile
    assert len({row // 32 for row in rows}) == 4


def test_random_weights_serve(checkpoints: dict[str, Path]) -> None:
    engine = start_engine(checkpoints["combined"], OLD, "dummy")
    (generation,) = generate(engine, prompts(5), 3)
    assert len(generation[2]) == 3
    assert not any(t.isnan().any() for t in held(engine).values() if t.is_floating_point())


def test_every_tensor_beside_the_parameters_has_a_class(checkpoints: dict[str, Path]) -> None:
    engine = start_engine(checkpoints["combined"])
    root = engine.roots()["target"]
    parameters = {f"target:{name}" for name, _ in root.named_parameters()}
    others = held(engine).keys() - parameters
    classes = {
        path: next((rule.tensor_class for rule in RULES if fnmatchcase(path, rule.pattern)), None)
        for path in others
    }
    assert set(classes.values()) == {"constant"}
    assert len(classes) == 3 * TOY.num_layers + 1
    assert all(not rule.may_move for rule in RULES)
    assert {path for path in engine.runtime_tensors() if not fnmatchcase(path, "*:caches.*")} == set()


def test_the_kernel_refers_to_the_parameters_themselves(checkpoints: dict[str, Path]) -> None:
    """After a reload, too: a copy would be what the kernel reads and nobody updates."""
    engine = start_engine(checkpoints["combined"])
    experts = engine.roots()["target"].get_submodule(EXPERTS)
    assert isinstance(experts, RoutedExperts)
    for via in ("layerwise", "direct"):
        engine.update(NEW, via)
        held_by_kernel = vars(experts.kernel.quantization)
        for name, parameter in (
            ("w1_scale", "w13_weight_scale"),
            ("w2_scale", "w2_weight_scale"),
            ("w1_bias", "w13_bias"),
            ("w2_bias", "w2_bias"),
        ):
            assert held_by_kernel[name].data_ptr() == experts.get_parameter(parameter).data_ptr()
