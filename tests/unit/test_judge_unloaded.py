"""Memory that no load wrote, or that keeps what one wrote before, is told from weights that are wrong otherwise."""

from collections.abc import Callable
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, primary


def test_weights_that_were_never_loaded_are_as_they_were_created(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        for part in audit.parts[fx.SCALES].values():
            part |= {"fp": fx.fp("created"), "const": 127, "patch": 127}
        audit.refresh(fx.SCALES)
    finding = primary(world, tmp_path, "uninitialised")
    assert "all bytes are 127, as they were created: nothing was loaded here" in finding["detail"]


@pytest.mark.parametrize(("loaded", "code"), [(True, "stale"), (False, "uninitialised")])
def test_weights_of_one_repeated_byte_that_an_update_left(tmp_path: Path, loaded: bool, code: str) -> None:
    """Scales of a checkpoint may all be one byte: the old ones, loaded right, are stale."""
    world = World()
    for audit in world.candidate.each("started", "updated"):
        for part in audit.parts[fx.SCALES].values():
            if part["source"] is not None:
                part |= {"fp": fx.fp("repeated", 116), "const": 116}
                if loaded and audit.observation == "started":
                    part["expected"] = part["fp"]
        audit.refresh(fx.SCALES)
    assert primary(world, tmp_path, code)["path"] == fx.SCALES


@pytest.mark.parametrize(("module", "code"), [(False, "numeric_cast"), (True, "uninitialised")])
def test_zeros_are_a_cast_of_scales_only_beside_weights(tmp_path: Path, module: bool, code: str) -> None:
    """Exponents below one are zero as numbers, and so is all of a module that lost its weights, padding included."""
    world = World()
    for audit in world.candidate.each("updated"):
        for path in (fx.SCALES, fx.EXPERTS) if module else (fx.SCALES,):
            audit.tensors[path]["const"] = 0
            for part in audit.parts[path].values():
                part |= {"fp": part["cast"] or fx.fp("zeros"), "const": 0}
            audit.refresh(path)
    finding = primary(world, tmp_path, code)
    if module:
        assert "nothing around it is right, and some of that is one repeated byte" in finding["detail"]


def test_padding_of_a_model_that_nothing_was_loaded_into_was_not_forgotten(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        for path, parts in audit.parts.items():
            for name, part in parts.items():
                part |= {"fp": fx.fp("left over", path, name), "const": None}
            audit.refresh(path)
        audit.part(fx.O_PROJ, "weight")["const"] = 0
    finding = primary(world, tmp_path, "uninitialised")
    assert "stale_padding" not in {one["code"] for one in finding["consequences"]}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda a: a.tensors[fx.W_UV].update(fp=fx.fp("poison"), const=255), id="poison"),
        pytest.param(lambda a: a.tensors[fx.W_UV].update(fp=fx.fp("nan"), nan=True), id="nan"),
        pytest.param(lambda a: a.part(fx.NORM, "weight").update(fp=fx.fp("poison"), const=255), id="part"),
        pytest.param(lambda a: a.part(fx.NORM, "weight").update(fp=fx.fp("created"), const=0), id="created"),
    ],
)
def test_uninitialised_by_content(tmp_path: Path, damage: Callable[[fx.Audit], None]) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        damage(audit)
        audit.refresh(fx.NORM)
    finding = primary(world, tmp_path, "uninitialised")
    assert "bytes that the load did not write" in finding["detail"]


def test_uninitialised_because_identical_loads_differ(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated", "repeated"):
        audit.tensors[fx.W_UV]["fp"] = fx.fp("garbage", audit.observation, audit.rank)
    finding = primary(world, tmp_path, "uninitialised")
    assert "two identical loads left different bytes" in finding["detail"]
