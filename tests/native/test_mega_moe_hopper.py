"""The Hopper kernel's layout, recipe and checks, without its GPU."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from workloads.kernels import mega_moe_build as build
from workloads.kernels import mega_moe_hopper as hopper
from workloads.kernels import mega_moe_hopper_layout as layout
from workloads.kernels import mega_moe_hopper_sizes as sizes
from workloads.kernels.activations import SituParameters, SwigluParameters
from workloads.kernels.mega_moe_hopper_kernel import HopperMegaMoE, HopperReference
from workloads.kernels.moe import LoadedLayoutReference, MoEKernel
from workloads.kernels.quantization import dequantize_mxfp4, quantize_mxfp4

torch.set_num_threads(1)
EXPERTS, HIDDEN, INNER = 3, 256, 128
E5M2 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).to(torch.float64)
Raw = tuple[Tensor, Tensor, Tensor, Tensor]


def raw_experts(seed: int = 0) -> Raw:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    spread = torch.exp2(torch.randint(-4, 3, (EXPERTS, 1, 1), generator=generator).float())
    return (*quantize_mxfp4(w13 * 0.2 * spread), *quantize_mxfp4(w2 * 0.1))


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    idx = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
    return x, idx, torch.rand(tokens, 2, generator=generator)


def decoded(weight: Tensor, scale: Tensor, gated: bool) -> Tensor:
    """A packed matrix as the kernel decodes it: by threads, byte lookups, then the row's scale; float64 [M, K]."""
    tiles, steps = weight.shape[:2]
    out = torch.zeros(tiles * 128, steps * 128, dtype=torch.float64)
    words = weight.contiguous().view(torch.int32).view(tiles, steps, 2, 2, 128, 4)
    for tile, step, warpgroup, half, thread, word in np.ndindex(words.shape):
        value = int(words[tile, step, warpgroup, half, thread, word]) & 0xFFFFFFFF
        warp, g, c = thread // 32, thread % 32 // 4, thread % 4
        columns, upper = word // 2, word % 2  # x and z: row g, y and w: row g + 8
        below_at = step * 512 + warpgroup * 256 + warp * 64 + (thread % 32) // 2 * 4 + 2 * half + upper
        below = min(int(scale[tile, below_at]), 26)
        table = [0, *(0x6C - 4 * below + step_ for step_ in (0, 4, 6, 8, 10, 12, 14))]
        physical = warpgroup * 64 + warp * 16 + upper * 8 + g
        largest = int(scale[tile, steps * 512 + physical])
        if gated:
            channel = tile * 64 + (physical // 16) * 8 + g
            row = channel + upper * tiles * 64
        else:
            row = tile * 128 + (physical // 16) * 16 + 2 * g + upper
        for part in range(2):
            for i in range(4):
                byte = table[value >> (16 * part + 4 * i) & 7] | (value >> (8 * i + 7 - 4 * part) & 1) << 7
                column = step * 128 + 64 * half + 16 * c + 8 * columns + 4 * part + i
                out[row, column] = E5M2[byte] * 2.0 ** (largest - 140)
    return out


@pytest.mark.parametrize(("gated", "rows", "columns"), [(True, 256, 128), (False, 128, 256)])
def test_the_layout_decodes_to_the_checkpoint_and_inverts(gated: bool, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (2, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(95, 122, (2, rows, columns // 32), dtype=torch.uint8, generator=generator)
    scale[0, 5], scale[1, 7, 0] = 122, 96
    codes[0, 9, :16] = 0  # a group of zeros has no say in its row's largest exponent
    scale[0, 9, 0] = 254
    packed = layout.pack(codes, scale, gated)
    restored = layout.unpack(packed.weight, packed.scale, gated)
    assert torch.equal(restored[0], codes)
    assert torch.equal(restored[1], scale)
    assert packed.out_of_range.tolist() == [0, 0]
    got = decoded(packed.weight[0], packed.scale[0], gated)
    assert torch.equal(got.abs(), dequantize_mxfp4(codes[0], scale[0]).abs())
    assert torch.equal(torch.signbit(got), torch.signbit(dequantize_mxfp4(codes[0], scale[0])))


def test_groups_out_of_range_are_counted_taken_as_the_smallest_and_restored() -> None:
    codes = torch.full((1, 128, 64), 0x22, dtype=torch.uint8)
    scale = torch.full((1, 128, 4), 120, dtype=torch.uint8)
    scale[0, 3, 1], scale[0, 4, 2], scale[0, 5, 0] = 94, 93, 0
    packed = layout.pack(codes, scale, gated=False)
    assert packed.out_of_range.tolist() == [2]
    assert torch.equal(layout.unpack(packed.weight, packed.scale, gated=False)[1], scale)
    folded = layout.folded_exponents(codes, scale)
    assert folded[0, 3].tolist() == [120, 94, 120, 120]
    assert (folded[0, 4, 2], folded[0, 5, 0]) == (94, 94)
    got = decoded(packed.weight[0], packed.scale[0], gated=False)
    assert torch.equal(got, dequantize_mxfp4(codes[0], folded[0]))


def test_preparing_in_place_keeps_addresses_and_refuses_what_is_damaged() -> None:
    kernel, (old, new) = HopperMegaMoE(), (raw_experts(0), raw_experts(7))
    held = kernel.prepare(*old)
    before = [tensor.data_ptr() for tensor in held]
    assert kernel.prepare(*new, into=held) is held
    assert [tensor.data_ptr() for tensor in held] == before
    for got, wanted in zip(kernel.restore(held), new, strict=True):
        assert torch.equal(got, wanted)
    new[3][2, 5, 1] = 255
    with pytest.raises(ValueError, match="w2_scale holds the byte 255, a NaN, first for local expert 2"):
        kernel.prepare(*new)
    with pytest.raises(ValueError, match="multiple of 128"):
        kernel.prepare(*(t[..., : t.shape[-1] // 4] for t in new[:2]), new[2][:, :64], new[3][:, :64])


def test_a_plan_knows_the_bytes_of_the_layout() -> None:
    held = HopperMegaMoE().prepare(*raw_experts())
    assert sizes.layer_bytes(EXPERTS, HIDDEN, INNER) == sum(part.nbytes for part in held)


def test_packing_takes_the_planned_memory_of_one_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 512, 128), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 122, (2, 512, 8), dtype=torch.uint8, generator=generator)
    held = layout.pack(codes, scale, gated=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        layout.pack(codes, scale, gated=True, into=held[:2])
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert 0.9 * sizes.PACK_BYTES < most / (512 * 256) <= sizes.PACK_BYTES


def test_an_update_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    kernel = HopperMegaMoE()
    held = kernel.prepare(*raw_experts())
    before = [part.clone() for part in held]
    with pytest.raises(ValueError, match=r"update of l1_weight has shape \(2, 2, 2, 8192\)"):
        kernel.prepare(*(part[:2] for part in raw_experts(1)), into=held)
    damaged = raw_experts(1)
    damaged[3][0, 0, 0] = 255
    with pytest.raises(ValueError, match="a NaN"):
        kernel.prepare(*damaged, into=held)
    assert all(map(torch.equal, held, before))


def quantized(row: np.ndarray, group: int) -> np.ndarray:
    """E4M3 by groups with a float32 scale, and back, each value by itself."""
    out = np.empty_like(row)
    for start in range(0, len(row), group):
        block = row[start : start + group].astype(np.float32)
        scale = np.float32(max(np.abs(block).max(), np.float32(1e-10)) / np.float32(448))
        for i, value in enumerate((block / scale).astype(np.float64)):
            step = 2.0 ** (max(np.frexp(value)[1] - 1, -6) - 3)
            out[start + i] = np.round(value / step) * step * np.float64(scale)
    return out


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).to(torch.bfloat16).double().numpy()


def test_the_reference_computes_the_stated_recipe() -> None:
    raw, (x, idx, weights) = raw_experts(), inputs(6)
    idx[2, 0] = -1
    reference = HopperReference()
    got = reference.forward(x, idx, weights, reference.prepare(*raw), None, EXPERTS, SituParameters())
    w13, w2 = (dequantize_mxfp4(*raw[i : i + 2]).numpy() for i in (0, 2))
    for token in range(6):
        y, row = np.zeros(HIDDEN, dtype=np.float32), quantized(x[token].double().numpy(), 128)
        for slot in range(2):
            e = int(idx[token, slot])
            if e >= 0:
                gate, up = np.split(bf16(w13[e] @ row), 2)
                h = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
                h = quantized(h * float(weights[token, slot]), 64)
                y += bf16(w2[e] @ h).astype(np.float32)
        np.testing.assert_array_equal(got[token].double().numpy(), bf16(y.astype(np.float64)))


def test_the_recipe_is_near_that_of_sm100() -> None:
    raw, given = raw_experts(), inputs(40)
    both: list[MoEKernel] = [HopperReference(), LoadedLayoutReference()]
    ours, theirs = (
        kernel.forward(*given, kernel.prepare(*raw), None, EXPERTS, SwigluParameters()).double()
        for kernel in both
    )
    difference = float((ours - theirs).norm() / theirs.norm())
    assert 0.005 < difference < 0.09  # each rounds activations twice to three bits


def tokens_and_experts() -> tuple[hopper.Tokens, hopper.Experts]:
    x, idx, weights = inputs(4)
    return hopper.Tokens(x, None, idx, weights), hopper.Experts(*HopperMegaMoE().prepare(*raw_experts()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t.float(), "x is torch.float32"),
        ("x", lambda t: t[:, :128].contiguous(), r"x is torch.bfloat16 \(4, 128\)"),
        ("x", lambda t: t.t().contiguous().t(), "x lies on cpu with strides"),
        ("x", lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape), "x lies on cpu"),
        ("topk_idx", lambda t: t.int(), "topk_idx is torch.int32"),
        ("topk_weights", lambda t: t[:, :1].contiguous(), "topk_weights is torch.float32"),
        ("topk_idx", lambda t: t.repeat(1, 20), "topk_weights is torch.float32"),
        ("w13", lambda t: t.view(torch.int8), "w13 is torch.int8"),
        ("w2", lambda t: t[:, :1].contiguous(), "w2 is torch.uint8"),
        ("w13_scale", lambda t: t[..., :-1], "w13_scale is torch.uint8"),
        ("w2_scale", lambda t: t.repeat(2, 1, 1)[::2], "w2_scale lies on cpu with strides"),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: object, message: str) -> None:
    tokens, experts = tokens_and_experts()
    assert callable(change)
    if name in tokens._fields:
        tokens = tokens._replace(**{name: change(getattr(tokens, name))})
    else:
        experts = experts._replace(**{name: change(getattr(experts, name))})
    with pytest.raises(ValueError, match=message):
        hopper.check_arguments(tokens, experts)


def test_limits_and_ids() -> None:
    tokens, experts = tokens_and_experts()
    hopper.check_arguments(tokens, experts)
    many = tokens._replace(topk_idx=tokens.topk_idx.repeat(1, 17), topk_weights=torch.ones(4, 34))
    with pytest.raises(ValueError, match="at most 32 slots of a token, and got 34"):
        hopper.check_arguments(many, experts)
    with pytest.raises(ValueError, match="topk_idx holds expert 3, but there are 3"):
        hopper.check_ids(torch.tensor([[0, 3]]), 3)
    hopper.check_ids(torch.tensor([[0, -1]]), 3)
    with pytest.raises(RuntimeError, match="x is on cpu"):
        hopper.run(tokens, experts, SituParameters())


def test_pairs_over_the_capacity_and_another_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, experts = tokens_and_experts()
    monkeypatch.setattr(hopper, "MOST_PAIRS", 7)
    with pytest.raises(
        ValueError, match="at most 7 pairs of tokens and slots, and got 8 with topk_idx 4 x 2"
    ):
        hopper.check_arguments(tokens, experts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(RuntimeError, match=r"compiled for compute capability 9.0 and cuda:0 has 8.9"):
        hopper.check_device(torch.device("cuda", 0))


def test_too_little_memory_says_what_was_wanted_and_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    shape = hopper._Shape(64, 2, EXPERTS, HIDDEN, INNER, *sizes.tasks(128, EXPERTS))
    with monkeypatch.context() as context:
        context.setattr(torch, "empty", full)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"for 64 tokens of 2 slots, .*lower backend.max_batch_t.*CUDA"
        ):
            hopper._workspace(shape, torch.device("cpu"), combine=True)


def test_no_expert_can_have_more_tiles_than_there_is_room_for() -> None:
    """Whether none of them has a token, one has all, or they have whatever: tiles of at most so many tokens each."""
    generator = np.random.default_rng(0)
    for pairs, experts in ((1, 1), (20, 1), (21, 1), (64, 64), (700, 8), (5000, 64), (49_152, 56)):
        largest, tiles = sizes.tasks(pairs, experts)
        one_has_all = [pairs, *[0] * (experts - 1)]
        spread = [generator.multinomial(pairs, generator.dirichlet([0.2] * experts)) for _ in range(50)]
        for counts in (one_has_all, *spread):
            assert sum(-(-int(count) // largest) for count in counts) <= tiles
            filled = sum(-(-int(count) // 8) * 8 for count in counts)
            assert filled <= pairs + 7 * min(experts, pairs)  # rows of the workspace


def test_a_build_without_a_compiler_or_with_errors_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as context:
        context.setattr(build.shutil, "which", lambda *_, **__: None)
        with pytest.raises(RuntimeError, match="no nvcc is on the PATH"):
            build.compiled.__wrapped__(32)
    answers = [
        subprocess.CompletedProcess([], 0, "release 13.0", ""),
        subprocess.CompletedProcess([], 1, "", "error: this is not C++"),
    ]
    monkeypatch.setattr(build.shutil, "which", lambda *_, **__: "nvcc")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: answers.pop(0))
    with pytest.raises(RuntimeError, match=r"could not compile mega_moe_sm90.cu: error: this is not C\+\+"):
        build.compiled.__wrapped__(32)
    assert not list(tmp_path.rglob("*.so"))


def test_the_instructions_are_those_of_the_kernels() -> None:
    source = build.SOURCE.read_text()
    used = {
        int(line.split("(")[1].split(",")[0]) for line in source.splitlines() if line.startswith("    RUN(")
    }
    assert used <= set(build.COLUMNS)
    assert "m64n24k32.f32.e5m2.e4m3" in build.wgmma_header()
