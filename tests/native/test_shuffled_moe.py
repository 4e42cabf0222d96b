"""The fused MXFP4 kernel's layout and its arithmetic against references written from their descriptions."""

import math

import pytest
import torch

from workloads.kernels.quantization import dequantize_mxfp4, quantize_mxfp4
from workloads.kernels.shuffled_moe import ExpertQuantization, ShuffledMoE, clamped_swiglu
from workloads.kernels.shuffled_moe_layout import (
    row_order,
    shuffle_rows,
    shuffle_scale,
    unshuffle_rows,
    unshuffle_scale,
)

torch.set_num_threads(1)
CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER = 3, 128, 128  # padded
USED_HIDDEN, USED_INNER = 96, 64


def test_rows_land_where_the_layout_says() -> None:
    order = row_order(256, False, CPU).tolist()
    for i in range(256):
        assert order[i // 128 * 128 + i % 4 * 32 + i % 128 // 4] == i
    up_then_gate = [*range(1, 256, 2), *range(0, 256, 2)]
    assert row_order(256, True, CPU).tolist() == [up_then_gate[i] for i in order]


@pytest.mark.parametrize("pairs", [True, False])
def test_scales_land_where_the_layout_says(pairs: bool) -> None:
    scale = torch.randint(0, 256, (2, 256, 8), dtype=torch.uint8)
    stored, rows = shuffle_scale(scale, pairs), shuffle_rows(scale, pairs)
    for row in range(256):
        for column in range(8):
            tile = (row // 128 * 2 + column // 4) * 512
            byte = tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert stored[1].flatten()[byte] == rows[1, row, column]


@pytest.mark.parametrize("pairs", [True, False])
def test_the_layout_is_undone(pairs: bool) -> None:
    scale = torch.randint(0, 256, (2, 384, 12), dtype=torch.uint8)
    bias = torch.randn(2, 384).to(torch.bfloat16)
    assert torch.equal(unshuffle_scale(shuffle_scale(scale, pairs), pairs), scale)
    assert torch.equal(unshuffle_rows(shuffle_rows(bias, pairs), pairs), bias)
    assert not torch.equal(shuffle_rows(bias, pairs), bias)


@pytest.mark.parametrize(("pairs", "rows", "used"), [(False, 128, 96), (True, 512, 320)])
def test_padding_does_not_stay_at_the_end(pairs: bool, rows: int, used: int) -> None:
    """Which is why stale padding ends up between real rows, and real rows of the load before in padding."""
    stored = shuffle_rows(torch.arange(rows).view(1, rows, 1) >= used, pairs).flatten()
    assert stored[:used].any()
    assert not stored[used:].all()


def padded_experts() -> tuple[dict[str, torch.Tensor], ShuffledMoE]:
    """Random experts in the loaded layout, with zero padding, and the kernel on their shuffled forms."""
    generator = torch.Generator().manual_seed(0)
    matrices = {
        "w13": torch.randn(EXPERTS, 2 * USED_INNER, USED_HIDDEN, generator=generator) / 8,
        "w2": torch.randn(EXPERTS, USED_HIDDEN, USED_INNER, generator=generator) / 8,
    }
    padded = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    loaded: dict[str, torch.Tensor] = {}
    for name, matrix in matrices.items():
        rows, columns = matrix.shape[1:]
        packed, scale = quantize_mxfp4(matrix)
        for suffix, piece, width, value in (("", packed, 2, 0), ("_scale", scale, 32, 1)):
            whole = torch.full((EXPERTS, padded[name][0], padded[name][1] // width), value, dtype=torch.uint8)
            whole[:, :rows, : columns // width] = piece
            loaded[name + suffix] = whole
        bias = torch.zeros(EXPERTS, padded[name][0], dtype=torch.bfloat16)
        bias[:, :rows] = torch.randn(EXPERTS, rows, generator=generator).to(torch.bfloat16)
        loaded[f"{name}_bias"] = bias
    quantization = ExpertQuantization(
        shuffle_scale(loaded["w13_scale"], True),
        shuffle_scale(loaded["w2_scale"], False),
        shuffle_rows(loaded["w13_bias"], True),
        shuffle_rows(loaded["w2_bias"], False),
    )
    return loaded, ShuffledMoE(quantization, 1.702, 7.0)


def reference(
    loaded: dict[str, torch.Tensor], x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """gpt-oss's MLP on the matrices without padding, one token and one expert at a time."""
    alpha = float(torch.tensor(1.702))  # as the kernel holds it
    out = torch.zeros(len(x), USED_HIDDEN, dtype=torch.float64)
    for t in range(len(x)):
        for e, weight in zip(idx[t].tolist(), weights[t].tolist(), strict=True):
            if not 0 <= e < EXPERTS:
                continue
            first = dequantize_mxfp4(loaded["w13"][e], loaded["w13_scale"][e])
            second = dequantize_mxfp4(loaded["w2"][e], loaded["w2_scale"][e])
            both = first[: 2 * USED_INNER, :USED_HIDDEN] @ x[t].double()
            both += loaded["w13_bias"][e, : 2 * USED_INNER]
            hidden = []
            for gate, up in both.view(-1, 2).tolist():
                gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
                hidden.append(gate / (1 + math.exp(-alpha * gate)) * (up + 1))
            activated = torch.tensor(hidden, dtype=torch.float64).to(torch.bfloat16).double()
            down = second[:USED_HIDDEN, :USED_INNER] @ activated + loaded["w2_bias"][e, :USED_HIDDEN]
            out[t] += weight * down
    return out


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, USED_HIDDEN, generator=generator).mul(4).to(torch.bfloat16)
    idx = torch.stack(
        [torch.randperm(5, generator=generator)[:2] - 1 for _ in range(tokens)]
    )  # -1, 3: others'
    return x, idx, torch.rand(tokens, 2, generator=generator)


def test_experts_in_the_layout_equal_the_plain_formula() -> None:
    loaded, kernel = padded_experts()
    x, idx, weights = routing(9)
    w13, w2 = shuffle_rows(loaded["w13"], True), shuffle_rows(loaded["w2"], False)
    found = kernel.forward(x, idx, weights, w13, w2, with_bias=True)
    torch.testing.assert_close(found, reference(loaded, x, idx, weights), rtol=1e-11, atol=1e-11)
    without = kernel.forward(x, idx, weights, w13, w2, with_bias=False)
    bias = sum(
        (weights[:, k : k + 1].double() * loaded["w2_bias"][idx[:, k].clamp(0, 2), :USED_HIDDEN])
        * ((idx[:, k] >= 0) & (idx[:, k] < EXPERTS)).unsqueeze(1)
        for k in range(2)
    )
    torch.testing.assert_close(found - without, bias, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"])
def test_stale_padding_shows_or_is_harmless(name: str) -> None:
    """Padding of one parameter that is not a number in any block makes the answers none, but for weights: every code
    of FP4 is a number, and they only count where the other matrix's padding, or the scale, is wrong too."""
    loaded, _ = padded_experts()
    x, idx, weights = routing(9)
    right = reference(loaded, x, idx, weights)
    rows, columns = (2 * USED_INNER, USED_HIDDEN) if name.startswith("w13") else (USED_HIDDEN, USED_INNER)
    stale = loaded[name]
    poison = float("nan") if name.endswith("bias") else 0xFF
    stale[:, rows:] = poison
    if not name.endswith("bias"):
        stale[:, :, columns // (32 if name.endswith("scale") else 2) :] = poison
    kernel = ShuffledMoE(
        ExpertQuantization(
            shuffle_scale(loaded["w13_scale"], True),
            shuffle_scale(loaded["w2_scale"], False),
            shuffle_rows(loaded["w13_bias"], True),
            shuffle_rows(loaded["w2_bias"], False),
        ),
        1.702,
        7.0,
    )
    packed = shuffle_rows(loaded["w13"], True), shuffle_rows(loaded["w2"], False)
    found = kernel.forward(x, idx, weights, *packed, with_bias=True)
    served = ((idx >= 0) & (idx < EXPERTS)).any(dim=1)
    if name in ("w13", "w2", "w2_bias"):  # of w2 and its bias the padded rows are results that nobody reads
        assert torch.equal(found, right) or torch.allclose(found, right, rtol=1e-11)
    else:
        assert found[served].isnan().all()


def test_activation_clamps_the_gate_above_only() -> None:
    gate = torch.tensor([-20.0, 0.0, 7.0, 9.0], dtype=torch.float64)
    up = torch.tensor([-9.0, 0.0, 9.0, 1.0], dtype=torch.float64)
    found = clamped_swiglu(gate, up, 1.702, 1.0, 7.0).tolist()
    expected = [
        min(g, 7) / (1 + math.exp(-1.702 * min(g, 7))) * (max(-7, min(u, 7)) + 1)
        for g, u in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    assert found == pytest.approx(expected, rel=1e-14)


def test_constants_are_per_expert() -> None:
    _, kernel = padded_experts()
    assert kernel.gemm1_alpha.tolist() == pytest.approx([1.702] * EXPERTS, rel=1e-7)
    assert kernel.gemm1_beta.tolist() == [1.0] * EXPERTS
    assert kernel.gemm1_clamp_limit.tolist() == [7.0] * EXPERTS
    loaded, _ = padded_experts()
    x, idx, weights = routing(4)
    packed = shuffle_rows(loaded["w13"], True), shuffle_rows(loaded["w2"], False)
    before = kernel.forward(x, idx, weights, *packed, with_bias=True)
    kernel.gemm1_beta[1] = 0
    after = kernel.forward(x, idx, weights, *packed, with_bias=True)
    assert ((before != after).any(dim=1) == (idx == 1).any(dim=1)).all()
