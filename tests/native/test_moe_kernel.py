"""Routing, activation and the MoE references against an independent computation, row by row in numpy."""

import math
import multiprocessing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from workloads.kernels.activations import SituParameters, SwigluParameters, sigmoid, situ
from workloads.kernels.moe import (
    ExpertWeights,
    LoadedLayoutReference,
    MegaMoEReference,
    MoEKernel,
)
from workloads.kernels.moe_dispatch import combine, dispatch
from workloads.kernels.quantization import (
    dequantize_fp8_rows,
    dequantize_mxfp4,
    quantize_fp8_rows,
    quantize_mxfp4,
)
from workloads.kernels.routing import route_sigmoid_noaux
from workloads.kernels.shared_expert import SharedWeights, unfuse_shared

torch.set_num_threads(1)

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 128, 256, 3
SITU = SituParameters(beta=4.0, linear_beta=25.0)
KERNELS: list[MoEKernel] = [MegaMoEReference(), LoadedLayoutReference()]
Array = npt.NDArray[np.float64]
Raw = tuple[Tensor, Tensor, Tensor, Tensor]


def raw_experts(seed: int = 0) -> Raw:
    """w13, w13_scale, w2, w2_scale in checkpoint layout, with scales that differ from block to block."""
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator)
    spread = torch.exp2(torch.randint(-4, 3, (EXPERTS, 1, 1), generator=generator).float())
    return (*quantize_mxfp4(w13 * 0.2 * spread), *quantize_mxfp4(w2 * 0.1))


def share(raw: Raw, experts: slice) -> Raw:
    """Copies of some experts."""
    w13, w13_scale, w2, w2_scale = (t[experts].clone() for t in raw)
    return w13, w13_scale, w2, w2_scale


def inputs(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x bf16 [T, H], topk_idx int64 [T, K], topk_weights float32 [T, K]; expert 5 is never chosen."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    bias = torch.zeros(EXPERTS)
    bias[5] = -10.0
    return x, *route_sigmoid_noaux(logits, bias, TOP_K, 2.5)


def run(kernel: MoEKernel, raw: Raw, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    return kernel.forward(x, idx, weights, kernel.prepare(*raw), None, EXPERTS, SITU)


def round_bf16(x: Array) -> Array:
    """float64 -> float32 -> bfloat16 by the carry of the lower 16 bits, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def fp8_round_trip(row: Array) -> Array:
    """Quantise one row per 32 columns and decode it again."""
    out = np.empty_like(row)
    for start in range(0, len(row), 32):
        block = row[start : start + 32].astype(np.float32)
        amax = max(np.abs(block).max(), np.float32(1e-4))
        scale = 2.0 ** math.ceil(math.log2(amax / np.float32(448)))
        for column, value in enumerate(block.astype(np.float64) / scale):
            step = 2.0 ** (max(math.frexp(value)[1] - 1, -6) - 3)  # three mantissa bits; subnormal below 2^-6
            out[start + column] = round(value / step) * step * scale  # Python rounds ties to even
    return out


def independent_moe(raw: Raw, x: Tensor, idx: Tensor, weights: Tensor) -> Array:
    """Each token and slot alone, in the order of the kernel's roundings."""
    w13 = dequantize_mxfp4(raw[0], raw[1]).numpy()
    w2 = dequantize_mxfp4(raw[2], raw[3]).numpy()
    y = np.zeros((len(x), HIDDEN), dtype=np.float32)
    for token in range(len(x)):
        row = fp8_round_trip(x[token].double().numpy())
        for slot in range(idx.shape[1]):
            e = int(idx[token, slot])
            if e < 0:
                continue
            gate_up = round_bf16((w13[e] * row).sum(axis=1))
            gate, up = gate_up[:INTERMEDIATE], gate_up[INTERMEDIATE:]
            h = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
            h = fp8_round_trip(h * float(weights[token, slot]))
            y[token] += round_bf16((w2[e] * h).sum(axis=1)).astype(np.float32)
    return round_bf16(y.astype(np.float64))


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_matches_the_independent_computation(kernel: MoEKernel) -> None:
    raw, (x, idx, weights) = raw_experts(), inputs(12)
    idx[3, 1] = idx[4, 0] = -1
    y = run(kernel, raw, x, idx, weights)
    assert (y.dtype, y.shape) == (torch.bfloat16, (12, HIDDEN))
    np.testing.assert_array_equal(y.double().numpy(), independent_moe(raw, x, idx, weights))


def test_routing_weight_enters_before_the_second_quantisation() -> None:
    """Weighting at the combine gives other numbers: the reference above would not notice if both agreed."""
    raw, (x, idx, _) = raw_experts(), inputs(12)
    idx = idx[:, :1].contiguous()
    third = torch.full((12, 1), 1 / 3)
    y = run(MegaMoEReference(), raw, x, idx, third)
    at_combine = (run(MegaMoEReference(), raw, x, idx, torch.ones(12, 1)).float() / 3).to(torch.bfloat16)
    assert not torch.equal(y, at_combine)


def test_both_layouts_agree_bitwise_and_restore_the_checkpoint() -> None:
    raw, (x, idx, weights) = raw_experts(), inputs(200)
    outputs = [run(kernel, raw, x, idx, weights) for kernel in KERNELS]
    assert torch.equal(*outputs)
    assert outputs[0].float().std() > 0.1
    for kernel in KERNELS:
        for got, expected in zip(kernel.restore(kernel.prepare(*raw)), raw, strict=True):
            assert (got.dtype, got.shape) == (torch.uint8, expected.shape)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_depends_neither_on_its_place_nor_on_its_neighbours(kernel: MoEKernel) -> None:
    raw, (x, idx, weights) = raw_experts(), inputs(64)
    y = run(kernel, raw, x, idx, weights)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(run(kernel, raw, x[order], idx[order], weights[order]), y[order])
    for token in (0, 17, 63):
        one = slice(token, token + 1)
        assert torch.equal(run(kernel, raw, x[one], idx[one], weights[one]), y[one])


def test_sums_are_exact_in_float64() -> None:
    """The claim that order cannot matter: columns of x and w permuted alike give the same bits."""
    raw, (x, _, _) = raw_experts(), inputs(16)
    q, scales = quantize_fp8_rows(x)
    rows = q.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
    w = dequantize_mxfp4(raw[0], raw[1])[0]
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(4))
    assert torch.equal(rows[:, order] @ w[:, order].T, rows @ w.T)
    exact = [math.fsum((rows[t] * w[n]).tolist()) for t in range(16) for n in range(32)]
    assert (rows @ w[:32].T).flatten().tolist() == exact


@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_slots_and_empty_batches_contribute_nothing(kernel: MoEKernel) -> None:
    raw, (x, idx, weights) = raw_experts(), inputs(6)
    idx[2] = -1
    idx[4, 1:] = -1
    y = run(kernel, raw, x, idx, weights)
    assert torch.equal(y[2], torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert torch.equal(
        y[4:5], run(kernel, raw, x[4:5], idx[4:5, :1].contiguous(), weights[4:5, :1].contiguous())
    )
    assert run(kernel, raw, x[:0], idx[:0], weights[:0]).shape == (0, HIDDEN)
    assert not run(kernel, raw, x, torch.full_like(idx, -1), weights).any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", [1, 3])
def test_nan_scale_reaches_exactly_the_tokens_of_its_expert(kernel: MoEKernel, part: int) -> None:
    raw, (x, idx, weights) = raw_experts(), inputs(20)
    raw[part][2, 7, 1] = 255
    y = run(kernel, raw, x, idx, weights)
    hit = (idx == 2).any(dim=1)
    assert hit.any()
    assert not hit.all()
    assert torch.equal(torch.isnan(y).any(dim=1), hit)


@pytest.mark.parametrize("kernel", KERNELS)
def test_prepare_into_copies_and_keeps_every_address(kernel: MoEKernel) -> None:
    old, new = raw_experts(0), raw_experts(9)
    weights = kernel.prepare(*share(old, slice(None)))
    before = [(t.data_ptr(), t.stride()) for t in weights]
    updated = kernel.prepare(*new, into=weights)
    assert all(a is b for a, b in zip(updated, weights, strict=True))
    assert [(t.data_ptr(), t.stride()) for t in updated] == before
    for got, expected in zip(kernel.restore(updated), new, strict=True):
        assert torch.equal(got, expected)
    assert len({t.untyped_storage().data_ptr() for t in (*weights, *new)}) == 8


def test_fused_l1_and_scales_are_fresh_and_l2_is_the_loaded_storage() -> None:
    raw = raw_experts()
    weights = MegaMoEReference().prepare(*raw)
    aliased = [t.data_ptr() == r.data_ptr() for t, r in zip(weights, raw, strict=True)]
    assert aliased == [False, False, True, False]
    restored = MegaMoEReference().restore(weights)[2]
    restored[0, 0] ^= 0xFF  # a loader that writes w2 in place writes the kernel's weight
    weights = MegaMoEReference().prepare(raw[0], raw[1], restored, raw[3], into=weights)
    assert torch.equal(weights.l2_weight.view(torch.uint8), restored)


@pytest.mark.parametrize("kernel", KERNELS)
def test_misfit_weights_are_refused(kernel: MoEKernel) -> None:
    w13, s13, w2, s2 = raw_experts()
    with pytest.raises(ValueError, match=r"Expert tensor w2_scale is torch.uint8 \(8, 128, 4\)"):
        kernel.prepare(w13, s13, w2, s2[..., :4])
    with pytest.raises(ValueError, match=r"Expert tensor w13_scale is torch.float8_e8m0fnu"):
        kernel.prepare(w13, s13.view(torch.float8_e8m0fnu), w2, s2)
    weights = kernel.prepare(w13, s13, w2, s2)
    with pytest.raises(ValueError, match="its storage has"):
        kernel.prepare(w13[:1], s13[:1], w2[:1], s2[:1], into=weights)
    x, idx, topk_weights = inputs(2)
    with pytest.raises(
        ValueError, match="This rank holds 8 experts and the group has 1 ranks, but num_experts is 16"
    ):
        kernel.forward(x, idx, topk_weights, weights, None, 16, SITU)


def test_mega_moe_needs_its_alignment() -> None:
    w13, s13 = quantize_mxfp4(torch.ones(1, 2 * 96, 128))
    w2, s2 = quantize_mxfp4(torch.ones(1, 128, 96))
    with pytest.raises(
        ValueError, match="intermediate size of an expert to be a positive multiple of 128, but it is 96"
    ):
        MegaMoEReference().prepare(w13, s13, w2, s2)


def test_situ_formula_and_saturation() -> None:
    gate = torch.linspace(-30, 30, 61, dtype=torch.float64)
    up = torch.linspace(90, -90, 61, dtype=torch.float64)
    expected = [
        2.0 * math.tanh(g / 2.0) / (1 + math.exp(-g)) * 7.0 * math.tanh(u / 7.0)
        for g, u in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    got = situ(gate, up, SituParameters(beta=2.0, linear_beta=7.0))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
    single = situ(gate.float(), up.float(), SituParameters(beta=2.0, linear_beta=7.0))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), got, rtol=1e-5, atol=0)
    assert situ(torch.tensor([1e4]), torch.tensor([1e4]), SITU).item() == 100.0
    assert situ(torch.tensor([-1e4]), torch.tensor([1e4]), SITU).item() == 0.0


def test_swiglu_clamps_the_gate_from_above_and_the_linear_branch_on_both_sides() -> None:
    gate = torch.linspace(-30, 30, 61, dtype=torch.float64)
    up = torch.linspace(90, -90, 61, dtype=torch.float64)
    for limit in (10.0, math.inf):
        expected = [
            min(g, limit) / (1 + math.exp(-min(g, limit))) * max(-limit, min(u, limit))
            for g, u in zip(gate.tolist(), up.tolist(), strict=True)
        ]
        got = SwigluParameters(limit)(gate, up)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
        assert SwigluParameters(limit)(gate.float(), up.float()).dtype == torch.float32


@pytest.mark.parametrize("activation", [SwigluParameters(0.05), SwigluParameters()])
def test_the_kernel_applies_the_activation_it_is_given(activation: SwigluParameters) -> None:
    raw, given = raw_experts(), inputs(6)
    outputs = []
    for kernel in KERNELS:
        weights = kernel.prepare(*share(raw, slice(None)))
        outputs.append(kernel.forward(*given, weights, None, EXPERTS, activation))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], run(KERNELS[0], raw, *given))
    assert (outputs[0].abs().max() < 0.1) == (activation.limit == 0.05)


def shared_expert(seed: int = 7) -> SharedWeights:
    """In the loaded layout, with scales that differ from group to group."""
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(2 * INTERMEDIATE, HIDDEN, generator=generator) * 0.2
    w2 = torch.randn(HIDDEN, INTERMEDIATE, generator=generator) * 0.1
    spread = torch.exp2(torch.randint(-3, 3, (INTERMEDIATE, 1), generator=generator).float()).repeat(2, 1)
    return SharedWeights(*quantize_fp8_rows(w13 * spread), *quantize_fp8_rows(w2))


def test_the_shared_expert_is_added_last_and_unweighted() -> None:
    raw, (x, idx, weights) = raw_experts(), inputs(40)
    loaded, outputs = shared_expert(), []
    for kernel in KERNELS:
        shared = kernel.prepare_shared(SharedWeights(*(tensor.clone() for tensor in loaded)))
        routed = kernel.prepare(*share(raw, slice(None)))
        outputs.append(kernel.forward(x, idx, weights, routed, None, EXPERTS, SITU, shared))
    assert torch.equal(outputs[0], outputs[1])
    w13, w2 = (dequantize_fp8_rows(*loaded[i : i + 2]).numpy() for i in (0, 2))
    rows = dequantize_fp8_rows(*quantize_fp8_rows(x)).numpy() @ w13.T
    gate, up = np.split(torch.from_numpy(rows).to(torch.bfloat16).double().numpy(), 2, axis=1)
    hidden = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    hidden = dequantize_fp8_rows(*quantize_fp8_rows(torch.from_numpy(hidden))).numpy()
    own = torch.from_numpy(hidden @ w2.T).to(torch.bfloat16)
    alone = KERNELS[1].forward(x, torch.full_like(idx, -1), weights, routed, None, EXPERTS, SITU, loaded)
    assert (
        alone == own
    ).double().mean() > 0.999  # numpy's tanh may round an activation to the other FP8 value
    without = run(KERNELS[0], raw, x, idx, weights)
    error = (outputs[0].double() - without.double() - own.double()).abs()
    assert (error <= (outputs[0].double().abs() + without.double().abs()) * 2**-8).all()


def test_the_fused_shared_expert_keeps_every_byte_and_its_storage() -> None:
    kernel, loaded = MegaMoEReference(), shared_expert()
    fused = kernel.prepare_shared(loaded)
    for back, wanted in zip(unfuse_shared(fused), loaded, strict=True):
        assert torch.equal(back.view(torch.uint8), wanted.view(torch.uint8))
    assert fused.l2_weight.data_ptr() == loaded.l2_weight.data_ptr()
    assert fused.l1_weight.data_ptr() != loaded.l1_weight.data_ptr()
    assert fused.l1_scale.stride() == (1, 2 * INTERMEDIATE)
    gate, up = loaded.l1_weight.view(torch.uint8).chunk(2)
    rows = fused.l1_weight.view(torch.uint8)
    for i in (0, 7, 8, INTERMEDIATE - 1):
        assert torch.equal(rows[16 * (i // 8) + i % 8], gate[i])
        assert torch.equal(rows[16 * (i // 8) + 8 + i % 8], up[i])
    places = [tensor.data_ptr() for tensor in fused]
    other = shared_expert(seed=8)
    assert [tensor.data_ptr() for tensor in kernel.prepare_shared(other, into=fused)] == places
    for back, wanted in zip(unfuse_shared(fused), other, strict=True):
        assert torch.equal(back.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activation_of_an_element_depends_on_it_alone(dtype: torch.dtype) -> None:
    gate = torch.randn(1003, generator=torch.Generator().manual_seed(5)).to(dtype) * 4
    for function in (sigmoid, lambda g: situ(g, g, SITU), lambda g: SwigluParameters(3.0)(g, g)):
        alone = torch.cat([function(g.reshape(1)) for g in gate])
        assert torch.equal(function(gate), alone)


def test_routing_matches_its_formula() -> None:
    generator = torch.Generator().manual_seed(6)
    logits, bias = torch.randn(40, 16, generator=generator), torch.randn(16, generator=generator) * 0.1
    idx, weights = route_sigmoid_noaux(logits, bias, 4, 2.5)
    assert (idx.dtype, weights.dtype) == (torch.int64, torch.float32)
    scores = (1 / (1 + np.exp(-logits.double().numpy()))).astype(np.float32)
    for token in range(40):
        ranked = sorted(range(16), key=lambda e: (-(scores[token, e] + bias[e].numpy()), e))[:4]
        assert idx[token].tolist() == ranked
        chosen = scores[token, ranked].astype(np.float64)
        np.testing.assert_allclose(weights[token].numpy(), chosen / chosen.sum() * 2.5, rtol=2e-7)
    torch.testing.assert_close(weights.sum(dim=1), torch.full((40,), 2.5))


def test_routing_bias_chooses_but_does_not_weigh() -> None:
    idx, weights = route_sigmoid_noaux(torch.zeros(1, 4), torch.tensor([0.0, 0.3, 0.1, 0.2]), 2, 1.0)
    assert idx.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_routing_gives_ties_to_the_lower_expert() -> None:
    for experts in (8, 64, 896):
        idx, _ = route_sigmoid_noaux(torch.zeros(3, experts), torch.zeros(experts), 6, 1.0)
        assert idx.tolist() == [list(range(6))] * 3


def test_routing_survives_scores_that_underflow_and_refuses_too_many_experts() -> None:
    _, weights = route_sigmoid_noaux(torch.full((1, 4), -1e4), torch.zeros(4), 2, 1.0)
    assert weights.tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="top_k is 5, but a token can choose between 1 and 4 experts"):
        route_sigmoid_noaux(torch.zeros(1, 4), torch.zeros(4), 5, 1.0)


def test_dispatch_groups_rows_by_expert_in_token_order() -> None:
    x, _, _ = inputs(4)
    idx = torch.tensor([[2, 0], [0, -1], [2, 1], [0, 2]])
    weights = torch.arange(8, dtype=torch.float32).reshape(4, 2)
    q, scales = quantize_fp8_rows(x)
    rows = dispatch(q, scales, idx, weights, 4, None)
    assert rows.counts == [3, 1, 3, 0]
    assert rows.topk_weight.tolist() == [1, 2, 6, 5, 0, 4, 7]
    tokens = [0, 1, 3, 2, 0, 2, 3]
    assert torch.equal(rows.x.view(torch.uint8), q.view(torch.uint8)[tokens])
    assert torch.equal(rows.x_scale, scales[tokens])


def test_combine_sums_in_slot_order() -> None:
    """1e4 + 1 - 1e4 loses nothing in float32, 2^30 + 1 - 2^30 does: which slot is last shows."""
    q, scales = quantize_fp8_rows(torch.zeros(2, 32))
    idx = torch.tensor([[0, 1, 2], [0, 2, 1]])
    rows = dispatch(q, scales, idx, torch.ones(2, 3), 3, None)
    value = torch.tensor([2.0**30, 2.0**30, 1.0, 1.0, -(2.0**30), -(2.0**30)])  # experts 0, 1, 2; tokens 0, 1
    y = combine(value.to(torch.bfloat16).unsqueeze(1).expand(6, 32).contiguous(), rows.routes)
    assert y[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("idx", "weights", "message"),
    [
        (torch.tensor([[4]]), torch.ones(1, 1), "topk_idx holds expert 4, but num_experts is 4"),
        (
            torch.tensor([[0]]),
            torch.ones(1, 1).to(torch.bfloat16),
            "topk_weights is torch.bfloat16, but MegaMoE takes",
        ),
        (
            torch.tensor([[0]], dtype=torch.int32),
            torch.ones(1, 1),
            "topk_idx is torch.int32, but MegaMoE takes",
        ),
    ],
)
def test_dispatch_refuses_what_it_would_misread(idx: Tensor, weights: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch(*quantize_fp8_rows(torch.zeros(1, 32)), idx, weights, 4, None)


RANKS = 4
TOKENS_OF_RANK = [9, 0, 14, 5]


def share_of_rank(rank: int) -> slice:
    start = sum(TOKENS_OF_RANK[:rank])
    return slice(start, start + TOKENS_OF_RANK[rank])


def all_tokens() -> tuple[Tensor, Tensor, Tensor]:
    x, idx, weights = inputs(sum(TOKENS_OF_RANK), seed=7)
    idx[3, 0] = idx[12, 2] = -1
    idx[20] = -1
    return x, idx, weights


def expert_parallel_rank(rank: int, folder: str) -> None:
    """One process of EP4: compute its tokens with both kernels, and record what it was sent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    local = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
    x, idx, weights = (t[share_of_rank(rank)] for t in all_tokens())
    result: dict[str, Tensor] = {}
    kernels: dict[str, MoEKernel] = {"mega_moe": MegaMoEReference(), "reference": LoadedLayoutReference()}
    for name, kernel in kernels.items():
        prepared: ExpertWeights = kernel.prepare(*share(raw_experts(), local))
        result[name] = kernel.forward(x, idx, weights, prepared, group, EXPERTS, SITU)
    numbers = torch.arange(share_of_rank(rank).start, share_of_rank(rank).stop).float()
    rows = dispatch(
        *quantize_fp8_rows(x), idx, numbers.unsqueeze(1).expand_as(idx).contiguous(), EXPERTS, group
    )
    result["tokens"], result["counts"] = rows.topk_weight, torch.tensor(rows.counts)
    torch.save(result, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(60)
def test_four_expert_parallel_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=expert_parallel_rank, args=(r, str(tmp_path))) for r in range(RANKS)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=40)
        assert [process.exitcode for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    x, idx, weights = all_tokens()
    expected = run(LoadedLayoutReference(), raw_experts(), x, idx, weights)
    for rank in range(RANKS):
        result = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
        for name in ("mega_moe", "reference"):
            assert torch.equal(result[name], expected[share_of_rank(rank)])
        chosen = [(idx == e).nonzero()[:, 0].tolist() for e in range(2 * rank, 2 * rank + 2)]
        assert result["counts"].tolist() == [len(tokens) for tokens in chosen]
        assert result["tokens"].tolist() == [*chosen[0], *chosen[1]]  # source rank, then token
