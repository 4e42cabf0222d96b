"""Gangs on GPUs: ranks are spawned, each on its own device, joined by NCCL; failures are told as on CPU."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.failure import AttemptError
from orchestrator.gangs.gang import run
from orchestrator.gangs.launch import GangSet, free_port
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step

ROOT = Path(__file__).parents[2]
TOY = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'native'}"}
GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]


def toy_set(folder: Path, via: str) -> GangSet:
    spec = GangSpec(
        name="candidate",
        output=str(folder / "candidate"),
        model=Model(),
        parallelism=Parallelism(tp=GPUS, gpus_per_node=GPUS),
        backend=Backend(engine="toy_engine:ToyEngine", device="cuda", communication="nccl"),
        checkpoints={},
        checkpoint_dirs={},
        steps=[Step("start", "old", "sum"), Step("update", "new", via)],
        master_port=free_port(),
    )
    return GangSet(folder / "set", [spec], ROOT, environment=TOY)


def test_one_rank_on_each_gpu_joined_by_nccl(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    run(toy_set(tmp_path, "sum"), None, 120, lambda e: events.append(dict(e)))
    ended = {e["rank"] for e in events if e["kind"] == "step" and e["index"] == 1 and e["state"] == "end"}
    assert ended == set(range(GPUS))


@pytest.mark.parametrize(("action", "type_"), [("kill", "rank_killed"), ("raise", "rank_failed")])
def test_failure_on_a_gpu_names_the_rank(tmp_path: Path, action: str, type_: str) -> None:
    with pytest.raises(AttemptError) as caught:
        run(toy_set(tmp_path, f"{action}:{GPUS - 1}"), None, 120, lambda e: None)
    assert (caught.value.failure.type, caught.value.failure.rank) == (type_, GPUS - 1)


def test_hang_on_a_gpu_shows_the_stacks(tmp_path: Path) -> None:
    with pytest.raises(AttemptError) as caught:
        run(toy_set(tmp_path, f"hang:{GPUS - 1}"), None, 40, lambda e: None)
    assert caught.value.failure.type == "hang"
    assert f"ranks {GPUS - 1} in _hang" in caught.value.failure.message
