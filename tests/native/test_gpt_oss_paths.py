"""Load paths that are particular about layouts, on gpt-oss, whose parameters serve in another layout than is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_oss_engine import TOY, start_engine
from k3_engine import NEW, OLD, different, generate, held, held_bytes, prompts

from workloads.engines.native import NativeEngine
from workloads.loading.arrivals import ReloadError
from workloads.loading.checkpoint import CheckpointError
from workloads.loading.generate import generate_checkpoint
from workloads.loading.paths import UPDATES
from workloads.spec import Arrival

EXPERTS = "*layers.1.mlp.experts.*"
Bytes = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["combined", "quark"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TOY, checkpoint_layout=layout)
    return generate_checkpoint(config, 0, tmp_path_factory.mktemp(layout) / "checkpoint")


@pytest.fixture(scope="module")
def fresh(checkpoint: Path, layout: str) -> dict[str, Bytes]:
    """Bytes of a fresh start on each checkpoint."""
    return {name: held_bytes(engine_on(checkpoint, layout, name)) for name in (OLD, NEW)}


def engine_on(checkpoint: Path, layout: str, name: str = OLD) -> NativeEngine:
    return start_engine(checkpoint, name, config=replace(TOY, checkpoint_layout=layout))


@pytest.mark.parametrize("via", list(UPDATES))
def test_experts_of_one_layer_alone_leave_the_rest_as_it_was(
    via: str, checkpoint: Path, layout: str, fresh: dict[str, Bytes]
) -> None:
    engine = engine_on(checkpoint, layout)
    engine.update(NEW, via, Arrival(tensors=(EXPERTS,)))
    changed = different(held_bytes(engine), fresh[OLD])
    assert len(changed) == 6
    assert all("layers.1.mlp.experts.w" in path for path in changed)
    assert not set(changed) & set(different(held_bytes(engine), fresh[NEW]))


def test_some_of_the_experts_of_a_layer_are_refused(
    checkpoint: Path, layout: str, fresh: dict[str, Bytes]
) -> None:
    """The others serve in the kernel's layout, where post-processing would shuffle them a second time."""
    engine = engine_on(checkpoint, layout)
    with pytest.raises(CheckpointError, match="would be half new"):
        engine.update(NEW, "direct", Arrival(tensors=("*layers.1.mlp.experts*down_proj*",)))
    assert different(held_bytes(engine), fresh[OLD]) == []


def test_sleep_keeps_the_kernel_constants_and_nothing_else(
    checkpoint: Path, layout: str, fresh: dict[str, Bytes]
) -> None:
    engine = engine_on(checkpoint, layout)
    engine.sleep(2)
    lost = different(held_bytes(engine), fresh[OLD])
    kept = held(engine).keys() - set(lost)
    assert {path.rpartition(".")[2] for path in kept} == {
        "gemm1_alpha",
        "gemm1_beta",
        "gemm1_clamp_limit",
        "inv_freq",
    }
    engine.wake()
    with pytest.raises(ReloadError, match="discarded by a sleep of level 2"):
        generate(engine, prompts(3))
    engine.update(NEW, "layerwise")
    assert different(held_bytes(engine), fresh[NEW]) == []
    engine.sleep(1)
    engine.wake()
    assert different(held_bytes(engine), fresh[NEW]) == []
