"""The control side runs on a login node: it imports no torch, ray, wandb or numpy, not even behind its back."""

import subprocess
import sys

import pytest

from orchestrator.provenance import checkout

BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "ray", "wandb", "vllm", "triton", "safetensors"}:
            raise ImportError(f"the control side imported {name}")
        return None

sys.meta_path.insert(0, Refuse())
"""
MODULES = [
    "cell",
    "cli",
    "driver",
    "experiment",
    "config.freeze",
    "gangs.gang",
    "verbs.status",
    "store",
    "cluster.submit",
    "judge.policy",
]


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=checkout(), timeout=120)


def test_the_blocking_itself_works() -> None:
    assert "the control side imported torch" in run("import workloads.rank").stderr


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_none_of_them(module: str) -> None:
    done = run(f"import orchestrator.{module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "+exp=kimi_k3_refit", "cluster.memory_gb=2"]])
def test_planning_imports_none_of_them(arguments: list[str], tmp_path: object) -> None:
    done = run(f"from orchestrator.cli import main; main({[*arguments, f'store={tmp_path}']!r})")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_planning_imports_nothing_heavy() -> None:
    """numpy, scipy, jinja2 and submitit are imported where they are used: a plan of one second has no time."""
    done = run(
        "from orchestrator.config.planning import plan; plan(['cluster.memory_gb=2']);"
        "print({'numpy', 'scipy', 'jinja2', 'submitit'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_the_driver_starts_without_what_only_planning_or_statistics_need() -> None:
    """Each takes longer to import than all else that the driver imports, and every job of a sweep starts one."""
    done = run(
        "import orchestrator.driver;"
        "print({'hydra', 'omegaconf', 'numpy', 'scipy', 'jinja2', 'submitit'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
