"""gpt-oss: what is left in its padding is found where shuffling puts it, and its kernel refers to parameters."""

from pathlib import Path

import pytest
import torch
from gpt_oss_engine import (
    EXPERTS,
    PARAMETERS,
    is_filled,
    parts_of,
    start_engine,
    write_layouts,
)
from k3_engine import NEW, OLD, different, generate, held, held_bytes, prompts

from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.models.gpt_oss.moe import RoutedExperts
from workloads.spec import Checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_layouts(tmp_path_factory.mktemp("gpt_oss"))


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
