"""Which folder of weights a gang is given, and who makes it."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator import staging
from orchestrator.failure import AttemptError
from orchestrator.store import Store
from workloads.spec import Backend, Checkpoint, Model

ROOT = Path(__file__).parents[2]
LLAMA = {"model_type": "llama", "hidden_size": 64}
CHANGED = {"perturbation": "every_tensor", "perturbation_seed": 3}
ENGINE = """#!/bin/sh
# stands for the python of an engine: notes how it was called, and "generates" an empty checkpoint
printf '%s\\n' "$@" > "$0.arguments"
cp "$3" "$0.config"
test "$4" = 7 && { echo "model_type is unknown." >&2; exit 1; }
mkdir "$5"
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    script = tmp_path / "python"
    script.write_text(ENGINE)
    script.chmod(0o755)
    return script


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(tmp_path / "store")
    opened.checkpoints.mkdir(parents=True, exist_ok=True)
    return opened


def _cell(engine: str, python: str | None, model: Model, **checkpoint: Any) -> dict[str, Any]:
    return {
        "model": asdict(model),
        "backend": asdict(Backend(engine=engine, python=python)),
        "cluster": {"image": None},
        "code": {"candidate": {"environment": None}},
        "checkpoints": {"new": asdict(Checkpoint(**checkpoint))},
    }


def _folder(cell: dict[str, Any], store: Store) -> Path:
    return staging._checkpoint_dir(cell, "new", store)


def test_the_engines_python_generates_what_transformers_describes(store: Store, engine: Path) -> None:
    model = Model(architecture="transformers", transformers=LLAMA)
    cell = _cell("vllm", str(engine), model, seed=5)
    folder = _folder(cell, store)
    arguments = engine.with_name("python.arguments").read_text().splitlines()
    assert arguments[:2] == ["-m", "workloads.loading.transformers_checkpoint"]
    assert arguments[3:] == ["5", str(folder)]
    assert json.loads(engine.with_name("python.config").read_text()) == LLAMA
    assert list(store.checkpoints.iterdir()) == [folder], "the described config is removed"
    engine.unlink()
    assert _folder(cell, store) == folder, "kept, not generated again"
    cell["checkpoints"]["new"]["seed"] = 6
    with pytest.raises(OSError, match="python"):
        _folder(cell, store)


def test_a_refused_config_is_an_error_with_the_generators_words(store: Store, engine: Path) -> None:
    model = Model(architecture="transformers", transformers={"model_type": "qwen9"})
    with pytest.raises(AttemptError, match=r"failed with code 1: model_type is unknown\.") as caught:
        _folder(_cell("vllm", str(engine), model, seed=7), store)
    assert caught.value.failure.type == "checkpoint"
    assert not list(store.checkpoints.iterdir())


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given") / "checkpoint"
    script = (
        "import sys, torch; from pathlib import Path;"
        "from workloads.loading.transformers_checkpoint import write_values;"
        "write_values(Path(sys.argv[1]), 'test', {'lm_head.weight': ((8, 8), torch.float32)}, 0, '{}')"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=True, timeout=120)
    return folder


def test_vllm_gets_a_perturbed_checkpoint_as_files(store: Store, given: Path) -> None:
    cell = _cell("vllm", None, Model(architecture="transformers"), path=str(given), **CHANGED)
    folder = _folder(cell, store)
    assert folder.parent == store.checkpoints
    shards = [next(place.glob("*.safetensors")).read_bytes() for place in (folder, given)]
    assert len(shards[0]) > 256
    assert shards[0][-256:] != shards[1][-256:]
    assert (folder / "config.json").read_text() == "{}"
    assert _folder(cell, store) == folder
    cell["checkpoints"]["new"]["perturbation_seed"] = 4
    assert _folder(cell, store) != folder


def test_a_view_or_unchanged_files_are_used_where_they_lie(store: Store, given: Path) -> None:
    view = _cell("native", None, Model(), path=str(given), **CHANGED)
    plain = _cell("vllm", None, Model(architecture="transformers"), path=str(given))
    assert _folder(view, store) == _folder(plain, store) == given
    assert not list(store.checkpoints.iterdir())
