"""What the benchmarks of a GPU say without one, and that the reload that they measure loads."""

import subprocess

import pytest
import torch

from tests.benchmarks import reload_on_gpu
from tests.benchmarks.__main__ import NAMES, main
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import Backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which they would measure")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_a_benchmark_says_so(name: str) -> None:
    with pytest.raises(SystemExit, match="torch finds none on this machine"):
        main([name])


def test_all_are_run_apart_and_what_failed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command[-1])
        return subprocess.CompletedProcess(command, int(command[-1].startswith("regions")))

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["all"]) == 1
    assert ran == NAMES
    assert "Missed or failed: regions_on_gpu." in capsys.readouterr().out
    assert main(["audit_on_gpu", "mega_moe_on_gpu"]) == 0
    assert main(["nonsense"]) == 2
    assert "all, or NAME ..., of audit_on_gpu" in capsys.readouterr().err


def test_the_measured_reload_brings_every_weight() -> None:
    torch.set_num_threads(1)
    config = KimiK3Config(num_layers=2, full_attention_layers=[1], num_experts=4, num_mtp_layers=0)
    checkpoint = reload_on_gpu.Pinned(config, pinned=False)
    engine = reload_on_gpu.Engine(config, Backend(), checkpoint)
    root = engine.roots()["target"]
    before = {name: parameter.clone() for name, parameter in root.named_parameters()}
    for via in ("direct", "layerwise"):
        for parameter in root.parameters():
            parameter.data.view(torch.uint8).zero_()
        engine.load(via)
        for name, parameter in root.named_parameters():
            assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name
