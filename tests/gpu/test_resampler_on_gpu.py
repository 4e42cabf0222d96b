"""MiniCPM on a GPU: its table of positions is made on the host, and only the model's hook brings it over."""

from pathlib import Path

import pytest
import torch

from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.loading.generate import generate_checkpoint
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.minicpm.model import MiniCpm
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = MiniCpmConfig(num_layers=2)
MEDIA = [Prompt("media", (65, *range(258, 300), 66, *range(318, 330), 67))]


def engine(folder: Path, device: str) -> NativeEngine:
    where = str(generate_checkpoint(CONFIG, 0, folder / "checkpoint"))
    spec = GangSpec(
        name="candidate",
        output="",
        model=Model("minicpm_toy", "minicpm", minicpm=CONFIG),
        parallelism=Parallelism(),
        backend=Backend(moe_kernel="reference", device=device, max_model_len=128, max_requests=4),
        checkpoints={"old": Checkpoint(), "new": Checkpoint(perturbation="every_tensor")},
        checkpoint_dirs={"old": where, "new": where},
        steps=[],
    )
    return NativeEngine(spec, 0)


def positions(serving: NativeEngine) -> torch.Tensor:
    target = serving.roots()["target"]
    assert isinstance(target, MiniCpm)
    return target.resampler.pos_embed


@pytest.mark.parametrize("via", ["dummy", "safetensors"])
def test_every_start_and_update_leaves_the_positions_on_the_gpu(tmp_path: Path, via: str) -> None:
    serving = engine(tmp_path, "cuda")
    assert positions(serving).device.type == "cpu"
    serving.start("old", via)
    place = positions(serving).data_ptr()
    for update in ("layerwise", "direct"):
        assert positions(serving).device.type == "cuda"
        assert len(serving.generate(MEDIA, Sampling(max_new_tokens=3))[0].token_ids) == 3
        serving.update("new", update)
        assert positions(serving).data_ptr() == place


def test_without_the_hook_the_first_image_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = engine(tmp_path, "cuda")
    monkeypatch.setattr(serving.roots()["target"], "process_weights_after_loading", lambda: None)
    serving.start("old", "dummy")
    with pytest.raises(RuntimeError, match="device"):
        serving.generate(MEDIA, Sampling(max_new_tokens=3))


def test_answers_are_those_of_the_host(tmp_path: Path) -> None:
    said = []
    for device in ("cpu", "cuda"):
        serving = engine(tmp_path, device)
        serving.start("old", "safetensors")
        said.append([g.token_ids for g in serving.generate(MEDIA, Sampling(max_new_tokens=6))])
    assert said[0] == said[1]
