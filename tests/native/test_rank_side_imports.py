"""Rank-side code runs in the engine's own environment: standard library, torch, numpy and safetensors only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTROL_SIDE = {"collectors/gsm8k"}
ALLOWED = {"torch", "numpy", "safetensors", "workloads", "collectors"}
WHERE_USED = {"triton", "deep_gemm", "ray", "tensorizer", "vllm", "tokenizers"}  # inside functions only
TRITON_MODULES = {  # Triton's compiler wants it at the top: these modules are themselves imported where used
    "collectors.row_sums_kernel",
    "workloads.kernels.regions_kernel",
}
CONTROL_PACKAGES = {
    "hydra",
    "omegaconf",
    "submitit",
    "orjson",
    "rich",
    "wandb",
    "jinja2",
    "scipy",
    "orchestrator",
}
LAYERS = ["kernels", "models", "loading", "engines"]  # a package may import the ones before it
ENTRY_POINTS = {
    ("engines", "vllm", "leader.py"),
    ("engines", "vllm", "worker.py"),
}  # as rank.py and scenario.py


def rank_side_files() -> list[Path]:
    files = [*ROOT.glob("workloads/**/*.py"), *ROOT.glob("collectors/**/*.py")]
    return [
        f for f in files if not any(str(f.relative_to(ROOT)).startswith(prefix) for prefix in CONTROL_SIDE)
    ]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at top level) of every import that runs; `if TYPE_CHECKING` blocks do not."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
    return found


@pytest.mark.parametrize("path", rank_side_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_what_an_engine_environment_has(path: Path) -> None:
    for module, at_top in imports(path):
        package = module.split(".")[0]
        if module in TRITON_MODULES:
            assert not at_top, f"{path} imports {module} at the top: import it where it is used"
        if package == "triton" and name_of(path) in TRITON_MODULES:
            continue
        assert package != "orchestrator", f"{path} imports {module}: nothing imports the control side"
        if package in sys.stdlib_module_names or package in ALLOWED:
            continue
        assert package in WHERE_USED, f"{path} imports {module}, which an engine's environment may lack"
        assert not at_top, f"{path} imports {module} at the top: import it where it is used"


def test_workloads_do_not_import_collectors_and_kernels_import_nothing_above_them() -> None:
    for path in ROOT.glob("workloads/**/*.py"):
        relative = path.relative_to(ROOT / "workloads").parts
        for module, at_top in imports(path):
            if relative[0] in LAYERS and relative not in ENTRY_POINTS:
                assert not module.startswith("collectors"), f"{path} imports {module}"
            if relative[0] == "kernels" and at_top:
                above = ("workloads.models", "workloads.loading", "workloads.engines")
                assert not module.startswith(above), f"{path} imports {module}"
            if relative[0] in ("loading", "models"):
                assert not module.startswith("workloads.engines"), f"{path} imports {module}"


def test_every_rank_side_module_imports_with_the_others_blocked() -> None:
    modules = sorted({name_of(path) for path in rank_side_files()} - TRITON_MODULES)
    script = (
        "import importlib, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {sorted(WHERE_USED | CONTROL_PACKAGES)!r}:\n"
        "            raise ModuleNotFoundError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
