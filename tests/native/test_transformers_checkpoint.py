"""Checkpoints of transformers configurations: the values, given the tensors; and perturbed ones as files."""

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from workloads.loading.checkpoint import CheckpointError, check_finite, open_checkpoint
from workloads.loading.materialize import materialize
from workloads.loading.perturb import open_view
from workloads.loading.transformers_checkpoint import Tensors, describe, logit_modules, write_values
from workloads.spec import Checkpoint

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (512, 256),
    LAYER + "self_attn.q_proj.weight": (256, 256),
    LAYER + "self_attn.q_proj.bias": (256,),
    LAYER + "self_attn.q_norm.weight": (64,),
    LAYER + "linear_attn.A_log": (4,),
    LAYER + "linear_attn.dt_bias": (4,),
    LAYER + "linear_attn.conv1d.weight": (512, 1, 4),
    LAYER + "mamba.A_log": (512, 16),
    LAYER + "mamba.D": (512,),
    LAYER + "mlp.experts.gate_up_proj": (4, 256, 256),
    LAYER + "mlp.gate.e_score_correction_bias": (8,),
    LAYER + "layer_scalar": (1,),
    LAYER + "scale": (),
    "model.norm.weight": (256,),
    "lm_head.weight": (512, 256),
}
TIED = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}


def _tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Tensors:
    return {name: (shape, dtype) for name, shape in shapes.items()}


def _write(folder: Path, tensors: Tensors, seed: int = 0) -> Path:
    return write_values(folder, f"test seed {seed}", tensors, seed, '{"model_type": "test"}\n', 500_000)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("store") / "checkpoint", _tensors(SHAPES))


# Values ---------------------------------------------------------------------------------------------------------


def test_tensors_are_as_announced_and_finite(written: Path) -> None:
    reader = open_checkpoint(written)
    assert {name: reader.meta(name) for name in reader.names()} == {
        name: ("F32", shape) for name, shape in SHAPES.items()
    }
    check_finite(reader)
    assert json.loads((written / "config.json").read_text()) == {"model_type": "test"}


def test_two_writers_make_equal_files(written: Path, tmp_path: Path) -> None:
    again = _write(tmp_path / "again", _tensors(SHAPES))
    for file in sorted(written.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_bytes_are_pinned(written: Path) -> None:
    """A change here is a change of every generated checkpoint: raise FORMAT with it."""
    reader, digest = open_checkpoint(written), hashlib.sha256()
    for name in sorted(SHAPES):
        digest.update(reader.get(name).reshape(-1).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == "6ef2f41e8bdd5964"


def test_every_tensor_differs_between_seeds_and_none_is_constant(written: Path, tmp_path: Path) -> None:
    first, second = open_checkpoint(written), open_checkpoint(_write(tmp_path / "b", _tensors(SHAPES), 1))
    for name in SHAPES:
        a, b = first.get(name), second.get(name)
        assert (a != b).float().mean() > 0.9, name
        assert a.numel() == 1 or a.unique().numel() > 1, name


def test_a_tensor_does_not_depend_on_the_others(written: Path, tmp_path: Path) -> None:
    name = LAYER + "self_attn.q_proj.weight"
    alone = _write(tmp_path / "alone", _tensors({name: SHAPES[name], "lm_head.weight": (8, 8)}))
    assert torch.equal(open_checkpoint(alone).get(name), open_checkpoint(written).get(name))


@pytest.mark.parametrize(
    ("name", "mean", "spread"),
    [
        ("model.norm.weight", 1.0, 0.1),
        (LAYER + "mamba.D", 1.0, 0.1),
        (LAYER + "self_attn.q_proj.bias", 0.0, 0.02),
        (LAYER + "self_attn.q_proj.weight", 0.0, 1 / 16),
        (LAYER + "linear_attn.conv1d.weight", 0.0, 1 / 2),
        ("lm_head.weight", 0.0, 2 / 16),
        ("model.embed_tokens.weight", 0.0, 1.0),
    ],
)
def test_values_keep_activations_in_range(written: Path, name: str, mean: float, spread: float) -> None:
    values = open_checkpoint(written).get(name)
    assert values.mean().item() == pytest.approx(mean, abs=0.3 * spread)
    assert values.std().item() == pytest.approx(spread, rel=0.2)


def test_decays_are_moderate(written: Path) -> None:
    reader = open_checkpoint(written)
    for module in ("linear_attn", "mamba"):
        assert reader.get(f"{LAYER}{module}.A_log").abs().max() <= 0.7
    steps = reader.get(LAYER + "linear_attn.dt_bias")
    assert steps.min() >= -4
    assert steps.max() <= -1


def test_a_tied_embedding_gives_logits_of_the_usual_size(tmp_path: Path) -> None:
    embedding = open_checkpoint(_write(tmp_path / "tied", _tensors(TIED))).get("model.embed_tokens.weight")
    assert embedding.std().item() == pytest.approx(2 / 16, rel=0.05)
    assert "lm_head" in logit_modules(SHAPES)
    assert "embed_tokens" in logit_modules(TIED)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_half_precision_is_the_rounded_value(
    written: Path, tmp_path: Path, dtype: torch.dtype, stored: str
) -> None:
    reader = open_checkpoint(_write(tmp_path / "half", _tensors(SHAPES, dtype)))
    for name in SHAPES:
        assert reader.meta(name).dtype == stored
        assert torch.equal(reader.get(name), open_checkpoint(written).get(name).to(dtype)), name


# Bad input ------------------------------------------------------------------------------------------------------


def test_a_tensor_of_integers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'x' has dtype torch\.int64, for which no values are generated"
    ):
        write_values(tmp_path / "checkpoint", "test", {"x": ((2,), torch.int64)}, 0, "{}")
    assert not list(tmp_path.iterdir())


def test_an_interpreter_without_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        CheckpointError, match=r"needs transformers 5 or newer in .*python.*backend\.environment"
    ):
        describe({"model_type": "llama"})


# Perturbed checkpoints as files ---------------------------------------------------------------------------------

CHANGED = Checkpoint(perturbation="every_tensor", perturbation_seed=3)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder as people have them: tokenizer files, and the same weights in another format."""
    folder = _write(tmp_path / "given", _tensors(TIED))
    for name in ("tokenizer.json", "tokenizer_config.json", "pytorch_model.bin"):
        (folder / name).write_text(name)
    return folder


def test_a_perturbed_checkpoint_becomes_a_folder_of_its_own(given: Path, tmp_path: Path) -> None:
    folder = materialize(given, CHANGED, tmp_path / "changed")
    reader, view = open_checkpoint(folder), open_view(CHANGED, given)
    assert list(reader.names()) == list(view.names())
    assert all(torch.equal(reader.get(name), view.get(name)) for name in view.names())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (given / name).read_bytes()
        assert (folder / name).stat().st_ino != (given / name).stat().st_ino
    assert not (folder / "pytorch_model.bin").exists(), "an engine might read the unchanged weights from it"
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert materialize(given, CHANGED, folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times


def _command(given: Path, checkpoint: Checkpoint, folder: Path) -> subprocess.CompletedProcess[str]:
    described = given.parent / "checkpoint.json"
    described.write_text(json.dumps(asdict(checkpoint)))
    command = [sys.executable, "-m", "workloads.loading.materialize", str(given), str(described), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_writes_it_and_says_what_is_wrong(given: Path, tmp_path: Path) -> None:
    done = _command(given, CHANGED, tmp_path / "changed")
    assert (done.returncode, done.stderr) == (0, "")
    assert open_checkpoint(tmp_path / "changed").names()
    refused = _command(given, Checkpoint(), tmp_path / "same")
    assert refused.returncode == 1
    assert "the perturbation is 'none', nothing is to write" in refused.stderr
    missing = Checkpoint(perturbation="one_tensor", perturbation_target="model.lm_head.weight")
    assert "a tensor named 'model.lm_head.weight'" in _command(given, missing, tmp_path / "one").stderr
    assert not (tmp_path / "one").exists()
