"""BF16 matrices quantised to FP8 while they are loaded: formulas, every load path, memory, answers."""

from pathlib import Path

import pytest
import torch
from k3_engine import NEW, OLD, different, generate, held, held_bytes, prompts, start_engine

from workloads.engines.native import NativeEngine
from workloads.kernels.fp8_channels import channel_codes, channel_scales, dequantize_channels
from workloads.loading.checkpoint import open_checkpoint
from workloads.loading.loader import Loader
from workloads.loading.paths import UPDATES
from workloads.loading.weights import ModelRoot
from workloads.models.layers import RMSNorm
from workloads.models.online_fp8 import Matrix, quantize_online

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)


def weights(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    spread = torch.logspace(-6, 3, rows, dtype=torch.float64).unsqueeze(1)
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread).to(torch.bfloat16)


def test_codes_are_the_nearest_and_scales_map_the_largest_to_448() -> None:
    weight = weights(40, 64)
    codes, scales = channel_codes(weight), channel_scales(weight)
    wide = weight.to(torch.float64)
    expected = (wide.abs().amax(1) / 448).to(torch.float32)
    assert torch.equal(scales, expected)
    finite = E4M3[E4M3.isfinite()]
    targets = (weight.to(torch.float32) / expected.unsqueeze(1)).to(torch.float64)
    nearest = (targets.unsqueeze(-1) - finite).abs().amin(-1)
    assert torch.equal((targets - codes.to(torch.float64)).abs(), nearest)
    assert codes.to(torch.float64).abs().amax(1).eq(448).all()
    error = (dequantize_channels(codes, scales) - wide).abs()
    assert (error <= wide.abs() / 16 + scales.unsqueeze(1).to(torch.float64) / 512).all()


def test_rows_do_not_depend_on_each_other_and_zeros_stay_zeros() -> None:
    weight = weights(24, 32)
    weight[3] = 0
    assert torch.equal(
        channel_codes(weight)[5:9].view(torch.uint8), channel_codes(weight[5:9]).view(torch.uint8)
    )
    assert torch.equal(channel_scales(weight)[5:9], channel_scales(weight[5:9]))
    assert channel_codes(weight)[3].to(torch.float32).eq(0).all()
    assert channel_scales(weight).gt(0).all()


def online(folder: Path, checkpoint: str = OLD, via: str = "safetensors") -> NativeEngine:
    return start_engine(folder, checkpoint, via, moe_kernel="reference", online_quantization="fp8")


def test_the_engine_holds_codes_and_no_bf16_of_its_matrices(k3_checkpoint: Path) -> None:
    engine, plain = online(k3_checkpoint), start_engine(k3_checkpoint, moe_kernel="reference")
    matrices = {
        path: module
        for path, module in engine.roots()["target"].weight_modules()
        if isinstance(module, Matrix) and module.quantized
    }
    assert len(matrices) > 20
    for path, module in matrices.items():
        assert module.live("weight") is None
        assert module.weight_fp8 is not None
        loaded = plain.roots()["target"].get_submodule(path).get_parameter("weight")
        assert torch.equal(module.weight_fp8.view(torch.uint8), channel_codes(loaded).view(torch.uint8))
    kept = engine.roots()["target"].get_submodule("model.layers.3.self_attn.kv_b_proj")
    assert kept.get_parameter("weight").dtype is torch.bfloat16, "something else is derived from it"
    assert sum(t.nbytes for t in held(engine).values()) < sum(t.nbytes for t in held(plain).values())
    assert generate(engine, prompts(5), 3) != generate(plain, prompts(5), 3), "log-probabilities must differ"


@pytest.mark.parametrize("via", list(UPDATES))
def test_an_update_equals_a_start(via: str, k3_checkpoint: Path) -> None:
    engine, fresh = online(k3_checkpoint), online(k3_checkpoint, NEW)
    old = held_bytes(engine)
    places = {path: tensor.data_ptr() for path, tensor in held(engine).items()}
    engine.update(NEW, via)
    assert different(held_bytes(engine), held_bytes(fresh)) == []
    assert set(different(held_bytes(engine), old)) == held(engine).keys(), "every weight changes"
    assert {path: tensor.data_ptr() for path, tensor in held(engine).items()} == places
    assert generate(engine, prompts(5), 3) == generate(fresh, prompts(5), 3)


def test_a_streamed_and_a_restored_start_equal_a_whole_one(k3_checkpoint: Path, tmp_path: Path) -> None:
    whole = online(k3_checkpoint)
    assert different(held_bytes(online(k3_checkpoint, via="streamed")), held_bytes(whole)) == []
    whole.spec.saved_dir = str(tmp_path)
    whole.save(OLD, "tensorizer")
    restored = NativeEngine(whole.spec, 0)
    restored.start(OLD, "tensorizer")
    assert different(held_bytes(restored), held_bytes(whole)) == []


def test_parts_are_what_the_checkpoint_becomes(k3_checkpoint: Path) -> None:
    engine, reader = online(k3_checkpoint), open_checkpoint(k3_checkpoint)
    encoded = 0
    for root in engine.roots():
        for part in engine.parts(root):
            if (
                part.source is not None
                and callable(part.read_as)
                and not isinstance(part.read_as, torch.dtype)
            ):
                expected = part.read_as(reader.slice(part.source, part.region))
                assert torch.equal(
                    part.value.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
                )
                encoded += 1
    assert encoded > 100


def test_a_streamed_start_holds_one_module_in_bf16(
    k3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0

    class Watches(Loader):
        def post_process(self, path: str, module: Matrix) -> None:  # type: ignore[override]
            nonlocal most
            raw = [m for _, m in self.root.weight_modules() if isinstance(m, Matrix) and m.quantized]
            weights = [weight for m in raw if (weight := m.live("weight")) is not None]
            most = max(most, sum(weight.numel() > 0 for weight in weights))
            super().post_process(path, module)

    monkeypatch.setattr("workloads.engines.native.loader_class", lambda faults: Watches)
    online(k3_checkpoint, via="streamed")
    assert most == 1
    most = 0
    online(k3_checkpoint)
    assert most > 20, "a start as a whole holds all of them"


def test_a_model_without_matrices_is_refused() -> None:
    root = ModelRoot()
    root.norm = RMSNorm(8, 1e-5, "norm")
    with pytest.raises(ValueError, match="has no BF16 matrix that could be quantised"):
        quantize_online(root)
