"""Bad input of every kind: the engine says what is wrong and either serves on unchanged or never serves again."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from k3_engine import OLD, different, generate, held_bytes, make_spec, prompts, start_engine

from workloads.engines.native import NativeEngine
from workloads.loading.arrivals import Incoming, ReloadError
from workloads.loading.checkpoint import CheckpointError, open_checkpoint
from workloads.loading.loader import Loader
from workloads.loading.paths import UPDATES
from workloads.loading.shards import TensorMeta
from workloads.loading.steps import Reader
from workloads.loading.writer import write_checkpoint
from workloads.spec import Arrival, Checkpoint

BAD = "bad"
NORM = "language_model.model.layers.1.input_layernorm.weight"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.5."
DRAFTER = "language_model.model.layers.4.eh_proj.weight"

Change = Callable[[dict[str, torch.Tensor]], None]


def rewritten(base: Path, folder: Path, change: Change) -> Path:
    """The checkpoint in `base` with its tensors changed, one file."""
    reader = open_checkpoint(base)
    tensors = {name: reader.get(name) for name in reader.names()}
    change(tensors)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
    metas = [(name, TensorMeta(names[t.dtype], tuple(t.shape))) for name, t in tensors.items()]
    extra = {"config.json": (base / "config.json").read_bytes()}
    return write_checkpoint(folder, "changed", metas, tensors.__getitem__, 4 << 30, extra)


def engine_with(base: Path, bad: Path) -> NativeEngine:
    spec = make_spec(base)
    spec.checkpoints[BAD], spec.checkpoint_dirs[BAD] = Checkpoint(), str(bad)
    engine = NativeEngine(spec, 0)
    engine.start(OLD, "safetensors")
    return engine


def lacks(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NORM]


def has_extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NORM}_2"] = tensors[NORM]


def wrong_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM].float()


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def other_quantization(tensors: dict[str, torch.Tensor]) -> None:
    packed = tensors.pop(f"{EXPERT}w1.weight_packed")
    del tensors[f"{EXPERT}w1.weight_scale"]
    tensors[f"{EXPERT}w1.weight"] = torch.zeros(packed.shape[0], 2 * packed.shape[1], dtype=torch.bfloat16)


def drafter_of_another_width(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DRAFTER] = torch.zeros(384, 768, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lacks, f"tensor '{NORM}' is missing, expected BF16 \\(256,\\)"),
        (has_extra, f"tensor '{NORM}_2' is unexpected"),
        (wrong_dtype, f"tensor '{NORM}' has dtype F32, expected BF16"),
        (wrong_shape, f"tensor '{NORM}' has shape \\(255,\\), expected \\(256,\\)"),
        (other_quantization, f"tensor '{EXPERT}w1.weight_packed' is missing, expected U8"),
        (drafter_of_another_width, f"tensor '{DRAFTER}' has shape \\(384, 768\\), expected \\(256, 512\\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_the_engine_serves_on(
    change: Change, said: str, k3_checkpoint: Path, tmp_path: Path
) -> None:
    engine = engine_with(k3_checkpoint, rewritten(k3_checkpoint, tmp_path / "bad", change))
    before, answers = held_bytes(engine), generate(engine, prompts(3), 2)
    for via in UPDATES:
        with pytest.raises(CheckpointError, match=said):
            engine.update(BAD, via)
    assert different(held_bytes(engine), before) == []
    assert generate(engine, prompts(3), 2) == answers
    assert {event["load"] for event in engine.lifecycle.events} == {0}


@pytest.mark.parametrize(
    ("arrival", "said"),
    [
        (
            Arrival(bucket_bytes=1000),
            "524288 bytes on this rank, the buffer of the update 1000: set bucket_bytes to",
        ),
        (
            Arrival(tensors=("*.no_such_tensor",)),
            r"pattern '\*\.no_such_tensor' of the update matches none of the",
        ),
        (
            Arrival(tensors=("*.layers.1.self_attn.q_proj.weight",)),
            "in_proj_qkvgfab is made of, and it would be half",
        ),
        (
            Arrival(tensors=("*.experts.5.w1.*",)),
            "block_sparse_moe.experts is made of, and it would be half new",
        ),
        (Arrival(roots=("vision",)), "is for the model 'vision'; this engine has target, draft"),
    ],
)
def test_an_update_that_cannot_be_taken_is_refused_untouched(
    arrival: Arrival, said: str, k3_checkpoint: Path
) -> None:
    engine = start_engine(k3_checkpoint)
    before = held_bytes(engine)
    for via in UPDATES:
        with pytest.raises(CheckpointError, match=said):
            engine.update(OLD, via, arrival)
    assert different(held_bytes(engine), before) == []
    generate(engine, prompts(2))


# Streams that break off ----------------------------------------------------------------------------


class _Sends(Loader, ABC):
    """What the sender does wrong from the first update on."""

    def _pieces(self, reader: Reader) -> Iterator[Incoming]:
        pieces = super()._pieces(reader)
        return self.broken(pieces) if self.lifecycle.via in UPDATES and self.name == "target" else pieces

    @abstractmethod
    def broken(self, pieces: Iterator[Incoming]) -> Iterator[Incoming]: ...


class _EndsEarly(_Sends):
    def broken(self, pieces: Iterator[Incoming]) -> Iterator[Incoming]:
        for number, one in enumerate(pieces):
            if number == 40:
                return
            yield one


class _Repeats(_Sends):
    def broken(self, pieces: Iterator[Incoming]) -> Iterator[Incoming]:
        for one in pieces:
            yield one
            if one[0].placement.source == NORM:
                yield one


class _Casts(_Sends):
    def broken(self, pieces: Iterator[Incoming]) -> Iterator[Incoming]:
        for place, tensor in pieces:
            yield place, tensor.float() if place.placement.source == NORM else tensor


class _Shortens(_Sends):
    def broken(self, pieces: Iterator[Incoming]) -> Iterator[Incoming]:
        for place, tensor in pieces:
            yield place, tensor[:1] if place.placement.source == NORM else tensor


class _Grows(_Sends):
    def broken(self, pieces: Iterator[Incoming]) -> Iterator[Incoming]:
        for place, tensor in pieces:
            yield place, torch.zeros(1 << 20) if place.placement.source == NORM else tensor


class _LosesConnection(_Sends):
    def broken(self, pieces: Iterator[Incoming]) -> Iterator[Incoming]:
        yield next(pieces)
        raise ConnectionResetError("the trainer went away")


@pytest.mark.parametrize(
    ("loader", "error", "said"),
    [
        (_EndsEarly, ReloadError, "pieces missing, first"),
        (_Repeats, ReloadError, f"Tensor '{NORM}' came twice"),
        (_Casts, ReloadError, r"came as torch.float32 \(256,\), .* takes torch.bfloat16 \(256,\)"),
        (_Shortens, ReloadError, r"came as torch.bfloat16 \(1,\)"),
        (_Grows, ReloadError, "has 4194304 bytes, the buffer 600000"),
        (_LosesConnection, ConnectionResetError, "the trainer went away"),
    ],
)
@pytest.mark.parametrize("via", list(UPDATES))
def test_after_an_update_that_broke_off_the_engine_never_serves(
    via: str,
    loader: type[Loader],
    error: type[Exception],
    said: str,
    k3_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workloads.engines.native.loader_class", lambda faults: loader)
    engine = start_engine(k3_checkpoint)
    with pytest.raises(error, match=said):
        engine.update(OLD, via, Arrival(bucket_bytes=600_000))
    assert_unusable(engine, said)


def assert_unusable(engine: NativeEngine, said: str) -> None:
    for asked in (
        lambda: generate(engine, prompts(2)),
        lambda: engine.update(OLD, "layerwise"),
        lambda: engine.sleep(1),
        lambda: engine.save(OLD, "tensorizer"),
        lambda: engine.start(OLD, "safetensors"),
    ):
        with pytest.raises(ReloadError, match=f"must not serve.*{said}"):
            asked()
    ends = [event for event in engine.lifecycle.events if event["event"] == "load_end" and event["load"] == 1]
    assert [event["root"] for event in ends] == [], "a load that broke off has no end"


@pytest.mark.parametrize("how", ["written", "cut short", "removed"])
def test_a_file_that_changes_during_the_load_is_noticed(
    how: str, k3_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = rewritten(k3_checkpoint, tmp_path / "bad", lambda tensors: None)
    [file] = copy.glob("*.safetensors")

    class Changes(Loader):
        def place(self, destination: object, tensor: torch.Tensor) -> None:
            super().place(destination, tensor)  # type: ignore[arg-type]
            if self.lifecycle.via == "direct" and len(self.placed) == 20 and file.exists():
                status = file.stat()
                if how == "written":
                    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
                elif how == "cut short":
                    os.truncate(file, status.st_size // 2)
                else:
                    file.unlink()

    monkeypatch.setattr("workloads.engines.native.loader_class", lambda faults: Changes)
    engine = engine_with(k3_checkpoint, copy)
    said = {"written": "was written to since", "cut short": "bytes when .* and has", "removed": "it is gone"}[
        how
    ]
    with pytest.raises(ReloadError, match=said):
        engine.update(BAD, "direct")
    assert_unusable(engine, said)


def test_a_start_on_broken_files_is_refused(k3_checkpoint: Path, tmp_path: Path) -> None:
    engine = start_engine(k3_checkpoint)
    for via in ("tensorizer", "tensorizer_raw", "sharded_state"):
        engine.spec.saved_dir = str(tmp_path / via)
        engine.save(OLD, via)
        file = max((tmp_path / via).rglob("*.*tensors"), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size - 100)
        spec = make_spec(k3_checkpoint)
        spec.saved_dir = engine.spec.saved_dir
        broken = NativeEngine(spec, 0)
        with pytest.raises((CheckpointError, ReloadError), match=r"truncated|no complete tensorizer file"):
            broken.start(OLD, via)
        with pytest.raises((RuntimeError, ReloadError)):
            generate(broken, prompts(2))
        (tmp_path / via / "saved.json").unlink()
        with pytest.raises(CheckpointError, match="a step `save` did not end there"):
            NativeEngine(spec, 0).start(OLD, via)
