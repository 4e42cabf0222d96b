"""DeepSeek-V4 on a GPU holds the same bytes and says the same as on the CPU, through starts and updates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from workloads.engines import moe_layers
from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.kernels.moe_choice import Machine
from workloads.loading.generate import generate_checkpoint
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = DeepseekV4Config(num_layers=3, compress_ratios=[0, 4, 8, 0], num_hash_layers=1, num_experts=8)
PROMPTS = [Prompt(str(n), tuple((7 * n + 13 * j) % 251 for j in range(n))) for n in (1, 5, 70)]


def served(folder: Path, device: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What an engine says after each load, and the parameters and buffers that it holds at the end."""
    spec = GangSpec(
        name="candidate",
        output="",
        model=Model("toy", "deepseek_v4", deepseek_v4=CONFIG),
        parallelism=Parallelism(),
        backend=Backend(device=device, max_model_len=128, max_requests=4),
        checkpoints={"old": Checkpoint(), "new": Checkpoint(perturbation="every_tensor")},
        checkpoint_dirs={"old": str(folder), "new": str(folder)},
        steps=[],
    )
    engine, said = NativeEngine(spec, 0), []
    for load, checkpoint in ((engine.start, "old"), (engine.update, "new"), (engine.update, "old")):
        load(checkpoint, "safetensors" if load == engine.start else "layerwise")
        answers = engine.generate(PROMPTS, Sampling(max_new_tokens=4))
        said += [(g.token_ids, g.top_logprobs, g.draft_token_ids) for g in answers]
    state = {f"{root}:{name}": part for root in engine.roots() for name, part in _parts(engine, root)}
    return said, state


def _parts(engine: NativeEngine, root: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"{p.tensor}[{p.name}]", p.value.cpu().contiguous()) for p in engine.parts(root)]


def test_a_gpu_says_what_the_cpu_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same kernel of experts on both, in MegaMoE's layout: that of the GPU rounds otherwise."""
    monkeypatch.setattr(moe_layers, "machine", lambda device: Machine())
    folder = generate_checkpoint(CONFIG, 0, tmp_path / "checkpoint")
    (said, held), (on_gpu, held_on_gpu) = (served(folder, device) for device in ("cpu", "cuda"))
    assert on_gpu == said
    assert held.keys() == held_on_gpu.keys()
    for name, value in held.items():
        assert torch.equal(value.view(-1).view(torch.uint8), held_on_gpu[name].view(-1).view(torch.uint8)), (
            name
        )
