"""A checkpoint that cannot be loaded is refused on the command line: exit code 2, nothing submitted."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.config.schema import Root
from orchestrator.rules.checkpoint_rules import checkpoint_problems
from workloads.spec import Checkpoint

ROOT = Path(__file__).parents[2]
NORM = "language_model.model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proxy checkpoint in several files."""
    folder = tmp_path_factory.mktemp("weights") / "proxy model"
    script = (
        "import sys; from pathlib import Path; from workloads.loading.generate import generate_checkpoint;"
        "from workloads.models.kimi_k3.config import KimiK3Config;"
        "generate_checkpoint(KimiK3Config(), 0, Path(sys.argv[1]), shard_bytes=2 << 20)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=True, timeout=120)
    return folder


def header(file: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write(file: Path, entries: dict[str, dict[str, object]], data: bytes) -> None:
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def file_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def truncate(folder: Path) -> None:
    file = file_of(folder, NORM)
    file.write_bytes(file.read_bytes()[:-100])


def lose_file(folder: Path) -> None:
    file_of(folder, NORM).unlink()


def name_missing_tensor(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost"] = file_of(folder, NORM).name
    path.write_text(json.dumps(index))


def change(folder: Path, **changed: object) -> None:
    file = file_of(folder, NORM)
    entries, data = header(file)
    entries[NORM] |= changed
    write(file, entries, data)


def rename(folder: Path) -> None:
    file = file_of(folder, NORM)
    entries, data = header(file)
    entries["model.extra"] = entries.pop(NORM)
    write(file, entries, data)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = index["weight_map"].pop(NORM)
    path.write_text(json.dumps(index))


def plant_nan(folder: Path) -> None:
    file = file_of(folder, NORM)
    entries, data = header(file)
    begin = int(entries[NORM]["data_offsets"][0])  # type: ignore[index]  # JSON
    write(file, entries, data[:begin] + b"\xff\x7f" + data[begin + 2 :])


def orchestrate(folder: Path, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", f"checkpoints.old.path='{folder}'", f"store='{store}'"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "model-0000"),
        (lose_file, "model-0000"),
        (name_missing_tensor, "model.ghost"),
        (lambda folder: change(folder, shape=[128, 2]), "has shape (128, 2), expected (256,)"),
        (lambda folder: change(folder, dtype="F16"), "has dtype F16, expected BF16"),
        (rename, "tensor 'model.extra' is unexpected"),
        (rename, f"tensor '{NORM}' is missing"),
        (plant_nan, "holds 1 NaN or infinite values"),
    ],
)
def test_bad_weights_are_refused(
    damage: Callable[[Path], None], says: str, whole: Path, tmp_path: Path
) -> None:
    folder, store = tmp_path / "weights", tmp_path / "store"
    shutil.copytree(whole, folder)
    damage(folder)
    done = orchestrate(folder, store)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    assert "checkpoints.old.path" in said
    assert says in said
    assert "nothing was run or submitted" in said
    assert not list(store.glob("cells/*/attempt*"))


def decoder(folder: Path, *lost: str, **changed: object) -> Path:
    """Two shards of a transformers model, without the files `lost`. changed: entries of tensor `b`."""
    folder.mkdir()
    sound = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for name, file in (("a", "model-1.safetensors"), ("b", "model-2.safetensors")):
        write(folder / file, {str(changed.get("name", name)) if name == "b" else name: dict(sound)}, bytes(8))
    if "data" in changed:
        write(folder / "model-2.safetensors", {"b": dict(sound)}, changed["data"])  # type: ignore[arg-type]
    if "dtype" in changed:
        write(folder / "model-2.safetensors", {"b": {**sound, "dtype": "F16", "shape": [4]}}, bytes(8))
    placed = {"a": "model-1.safetensors", str(changed.get("name", "b")): "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(changed.get("config", {"model_type": "llama"})))
    for name in lost:
        (folder / name).unlink()
    return folder


def problems(**paths: Path) -> list[str]:
    root = Root()
    root.model.architecture = "transformers"
    root.checkpoints = {name: Checkpoint(path=str(path)) for name, path in paths.items()}
    return list(checkpoint_problems(root))


def test_sound_weights_of_transformers_pass(tmp_path: Path) -> None:
    assert problems(old=decoder(tmp_path / "a"), new=decoder(tmp_path / "b")) == []


@pytest.mark.parametrize(
    ("lost", "changed", "says"),
    [
        (["model-2.safetensors"], {}, "the file is missing, but the index names it"),
        (["config.json"], {}, "config.json is missing"),
        ([], {"config": {"hidden_size": 4}}, "there is no model_type in it"),
        ([], {"data": b"\x00\x00\xc0\x7f" + bytes(4)}, "holds 1 NaN or infinite values"),
        ([], {"name": "c"}, "tensor 'b' is in"),
        ([], {"name": "c"}, "tensor 'c' is in"),
        ([], {"dtype": "F16"}, "tensor 'b' is F32 (2,) in"),
    ],
)
def test_bad_weights_of_transformers_are_refused(
    lost: list[str], changed: dict[str, object], says: str, tmp_path: Path
) -> None:
    found = problems(old=decoder(tmp_path / "good"), new=decoder(tmp_path / "bad", *lost, **changed))
    assert any(says in problem for problem in found), found
    assert all(problem.startswith("checkpoints.new.path") for problem in found), found
    assert all(problem.endswith(".") for problem in found), found
