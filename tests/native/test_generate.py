"""Generated checkpoints: the same bytes everywhere, valid, published atomically."""

import hashlib
import multiprocessing
import os
import signal
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from workloads.kernels.quantization import dequantize_fp8_tiles, dequantize_mxfp4
from workloads.loading import writer
from workloads.loading.checkpoint import CheckpointError, check_finite, open_checkpoint, validate
from workloads.loading.generate import generate_checkpoint, generate_tensor
from workloads.loading.shards import TensorMeta
from workloads.loading.tensor_table import EXPERT, Quantized, TensorSpec, every_tensor
from workloads.loading.writer import write_checkpoint
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.tensors import sections

torch.set_num_threads(1)

TINY = KimiK3Config(vocab_size=128, num_experts=4, dense_intermediate_size=64, shared_intermediate_size=64)
SPECS = {spec.name: spec for spec in every_tensor(sections(TINY))}
LAYER = "language_model.model.layers.1."
ONE = {"x": TensorMeta("F32", (2,))}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def _no_files_but(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


# Values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("self_attn.q_proj.weight", "cc862da4f4d92f23"),
        ("self_attn.A_log", "d018115a3ce8ade9"),
        ("self_attn.dt_bias", "c2ba1b4b03932747"),
        ("input_layernorm.weight", "9f61412b03f2deb9"),
        ("block_sparse_moe.experts.3.w1.weight_packed", "e01e4031d7cfaef2"),
        ("block_sparse_moe.experts.3.w1.weight_scale", "68e296629aeb4759"),
    ],
)
def test_bytes_are_pinned(name: str, digest: str) -> None:
    """A change here is a change of every generated checkpoint: raise FORMAT with it."""
    assert _digest(generate_tensor(SPECS[LAYER + name], seed=7)) == digest


def test_a_tensor_does_not_depend_on_what_was_made_before() -> None:
    spec = SPECS[LAYER + "block_sparse_moe.experts.2.w2.weight_scale"]
    alone = generate_tensor(spec, 0)
    for other in list(SPECS.values())[:40]:
        generate_tensor(other, 0)
    alone_again = generate_tensor(spec, 0)
    assert torch.equal(alone, alone_again)
    alone_again.zero_()
    assert torch.equal(generate_tensor(spec, 0), alone), "the caller's tensor is its own"


def test_values_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[LAYER + "self_attn.q_proj.weight"]
    whole = generate_tensor(spec, 0)
    monkeypatch.setattr("workloads.loading.streams.CHUNK", 1000)
    assert torch.equal(generate_tensor(spec, 0), whole)


def test_every_tensor_differs_between_seeds_and_from_its_namesakes() -> None:
    seen = {_digest(generate_tensor(spec, seed)) for spec in SPECS.values() for seed in (0, 1)}
    assert len(seen) == 2 * len(SPECS)


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("self_attn.q_proj.weight", 0.0, 1 / 16),
        ("self_attn.q_conv1d.weight", 0.0, 0.5),
        ("input_layernorm.weight", 1.0, 0.1),
        ("self_attn.dt_bias", -2.5, 3 / 12**0.5),
        ("block_sparse_moe.routed_expert_up_proj.weight", 0.0, 1 / 128**0.5),
    ],
)
def test_spread_of_values(name: str, mean: float, std: float) -> None:
    values = generate_tensor(SPECS[LAYER + name], 0).float()
    assert values.std().item() == pytest.approx(std, rel=0.1)
    assert values.mean().item() == pytest.approx(mean, abs=5 * std / values.numel() ** 0.5)


def test_a_log_has_a_zero_tail_that_no_head_reads() -> None:
    a_log = generate_tensor(SPECS[LAYER + "self_attn.A_log"], 0)
    assert (a_log[:4] != 0).all()
    assert (a_log[4:] == 0).all()
    assert a_log.shape == (8,)


def test_experts_are_quantised_matrices_with_varying_scales() -> None:
    stem = "model.layers.0.block_sparse_moe.experts.0.w1."
    packed, scale = (
        generate_tensor(
            TensorSpec(name, "U8", shape, EXPERT, "", quantized=Quantized("mxfp4", name, stem, (256, 512))), 0
        )
        for name, shape in (("weight", (256, 256)), ("scale", (256, 16)))
    )
    assert 3 <= len(set(scale.flatten().tolist())) <= 8
    assert 116 <= int(scale.min()) <= int(scale.max()) <= 123
    matrix = dequantize_mxfp4(packed, scale)
    assert matrix.std().item() == pytest.approx(0.6 / 512**0.5, rel=0.1)
    largest = matrix.view(256, 16, 32).abs().amax(-1) / 2.0 ** (scale.double() - 127)
    assert largest.min() >= 3  # the scale is the smallest that does not saturate


@pytest.mark.parametrize("tile", [32, 128])
def test_neighbouring_tiles_of_fp8_have_different_scales(tile: int) -> None:
    """So that two scales that are exchanged show; the matrix keeps its spread."""
    names, spread = [f"layers.{layer}.attn.wq_b" for layer in range(6)], []
    patterns = set()
    for stem in names:
        form, shape = f"fp8_e8m0_block{tile}", (5 * tile - 3, 4 * tile)
        row = TensorSpec(f"{stem}.scale", "F8_E8M0", (5, 4), EXPERT, "")
        weight, scale = (
            generate_tensor(replace(row, quantized=Quantized(form, piece, stem, shape)), 0)
            for piece in ("weight", "scale")
        )
        codes = scale.view(torch.uint8).to(torch.int64)
        assert (codes.diff(dim=0) != 0).all()
        assert (codes.diff(dim=1) != 0).all()
        patterns.add(tuple(codes.flatten().tolist()))
        values = dequantize_fp8_tiles(weight, 2.0 ** (codes - 127).to(torch.float64), tile)
        spread.append(float(values.square().mean() * shape[1]) ** 0.5)
    assert len(patterns) == len(names)
    assert sum(spread) / len(spread) == pytest.approx(0.6, rel=0.1)


# Folders --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(TINY, 0, tmp_path_factory.mktemp("store") / "proxy", shard_bytes=200_000)


def test_generated_folder_is_complete_and_valid(generated: Path) -> None:
    reader = open_checkpoint(generated)
    validate(reader, SPECS.values())
    check_finite(reader)
    assert (generated / "config.json").read_text().count('"kimi_k3"') == 1
    assert _no_files_but(generated.parent, "proxy")


def test_files_hold_the_tensors_that_are_made_alone(generated: Path) -> None:
    reader = open_checkpoint(generated)
    for name, spec in SPECS.items():
        assert torch.equal(reader.get(name), generate_tensor(spec, 0)), name


def test_shards_respect_their_size_and_safetensors_reads_them(generated: Path) -> None:
    files = sorted(generated.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    reader, names = open_checkpoint(generated), set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118 - no mapping
            assert sum(sizes) <= 200_000 or len(sizes) == 1
            for name in opened.keys():  # noqa: SIM118
                assert torch.equal(opened.get_tensor(name), reader.get(name))
                names.add(name)
    assert names == set(SPECS)


def test_existing_folder_is_kept(generated: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in generated.iterdir()}
    assert generate_checkpoint(TINY, 0, generated) == generated
    assert {path: path.stat().st_mtime_ns for path in generated.iterdir()} == before


@pytest.mark.parametrize(("config", "seed"), [(TINY, 1), (KimiK3Config(), 0)])
def test_folder_of_another_checkpoint_is_refused(generated: Path, config: KimiK3Config, seed: int) -> None:
    with pytest.raises(CheckpointError, match=r"was made from .*seed 0 .*, expected .*Remove the folder"):
        generate_checkpoint(config, seed, generated)


def test_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match=r"is no checkpoint \(no model.safetensors.index.json\)"):
        generate_checkpoint(TINY, 0, tmp_path)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        generate_checkpoint(TINY, 0, tmp_path / "thesis.txt")


def test_incomplete_folder_is_refused_with_its_problem(generated: Path, tmp_path: Path) -> None:
    for path in generated.iterdir():
        if "00002" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+.safetensors: the file is missing"):
        generate_checkpoint(TINY, 0, tmp_path)


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "proxy").mkdir()
    write_checkpoint(tmp_path / "proxy", "test", ONE.items(), lambda _: torch.ones(2), 100, {})
    assert open_checkpoint(tmp_path / "proxy").get("x").tolist() == [1, 1]


# Writing --------------------------------------------------------------------------------------------------------


def test_only_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def make(_: str) -> torch.Tensor:
        held.append(sum(ref() is not None for ref in made))
        tensor = torch.ones(2)
        made.append(weakref.ref(tensor))
        return tensor

    metas = [(f"x{number}", TensorMeta("F32", (2,))) for number in range(8)]
    write_checkpoint(tmp_path / "proxy", "test", metas, make, 24, {})
    assert max(held) <= 1
    assert len(held) == 8


@pytest.mark.parametrize("made", [torch.ones(3), torch.ones(2, 1), torch.ones(2).bfloat16()])
def test_tensor_that_is_not_as_announced_is_refused_and_nothing_stays(
    tmp_path: Path, made: torch.Tensor
) -> None:
    with pytest.raises(CheckpointError, match=r"'x' was announced as F32 \(2,\) and made as"):
        write_checkpoint(tmp_path / "proxy", "test", ONE.items(), lambda _: made, 100, {})
    assert _no_files_but(tmp_path)


def test_dtypes_of_one_shard_are_aligned(tmp_path: Path) -> None:
    metas = [
        ("odd", TensorMeta("U8", (3,))),
        ("wide", TensorMeta("F32", (2,))),
        ("half", TensorMeta("BF16", (1,))),
    ]
    tensors = {"odd": torch.ones(3).byte(), "wide": torch.ones(2), "half": torch.ones(1).bfloat16()}
    write_checkpoint(tmp_path / "proxy", "test", metas, tensors.__getitem__, 100, {})
    assert list(open_checkpoint(tmp_path / "proxy").names()) == ["wide", "half", "odd"]


def _generate_slowly(folder: Path, started: "multiprocessing.synchronize.Barrier | None") -> None:
    def make(_: str) -> torch.Tensor:
        if started is not None:
            started.wait(60)  # neither process publishes before both have begun
        else:
            time.sleep(60)
        return torch.ones(2)

    write_checkpoint(folder, "test", ONE.items(), make, 100, {"config.json": b"{}"})


def test_two_processes_at_once_both_end_well(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2)
    workers = [fork.Process(target=_generate_slowly, args=(tmp_path / "proxy", barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert _no_files_but(tmp_path, "proxy")
    assert open_checkpoint(tmp_path / "proxy").get("x").tolist() == [1, 1]


def test_publishing_over_another_checkpoint_is_refused(tmp_path: Path) -> None:
    def make(_: str) -> torch.Tensor:
        write_checkpoint(tmp_path / "proxy", "faster", ONE.items(), lambda _: torch.zeros(2), 100, {})
        return torch.ones(2)

    with pytest.raises(CheckpointError, match=r"made from \['faster'\], expected 'slower'"):
        write_checkpoint(tmp_path / "proxy", "slower", ONE.items(), make, 100, {})
    assert _no_files_but(tmp_path, "proxy")


def test_killed_writer_leaves_a_temporary_folder_that_a_later_call_removes(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(
        target=_generate_slowly, args=(tmp_path / "proxy", None)
    )
    worker.start()
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".proxy.tmp-*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".proxy.tmp-")

    write_checkpoint(tmp_path / "proxy", "test", ONE.items(), lambda _: torch.ones(2), 100, {})
    assert _no_files_but(tmp_path, "proxy", left.name), "a live process may still be writing there"

    long_ago = time.time() - writer.ABANDONED_S - 60
    for path in [*left.iterdir(), left]:
        os.utime(path, (long_ago, long_ago))
    write_checkpoint(tmp_path / "other", "test", ONE.items(), lambda _: torch.ones(2), 100, {})
    assert left.exists(), "temporary folders of other checkpoints are not this call's to remove"
    (tmp_path / "proxy").rename(tmp_path / "moved")
    write_checkpoint(tmp_path / "proxy", "test", ONE.items(), lambda _: torch.ones(2), 100, {})
    assert _no_files_but(tmp_path, "moved", "other", "proxy")


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_sync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path / "proxy", "test", ONE.items(), lambda _: torch.ones(2), 100, {})
    assert _no_files_but(tmp_path)
