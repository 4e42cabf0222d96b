"""FP8 in tiles and NVFP4 against the formats' definitions, element by element; layouts of scales against index maps."""

import math

import pytest
import torch

from workloads.kernels.linear import round_to_bf16
from workloads.kernels.quantization import (
    dequantize_fp8_groups,
    dequantize_fp8_tiles,
    dequantize_nvfp4_blocks,
    quantize_fp8_groups,
    quantize_fp8_tiles,
    quantize_nvfp4,
    quantize_nvfp4_blocks,
)
from workloads.kernels.scale_layout import is_mn_major, swizzle, to_mn_major, unswizzle
from workloads.kernels.scaled_linear import fp8_tiles_linear_partial, nvfp4_linear_partial

torch.set_num_threads(1)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_codes() -> list[float]:
    """The finite values that are not negative, by code: bias 7, subnormals in steps of 2^-9."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    return small + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]


CODES = e4m3_codes()


def e4m3(x: float) -> float:
    """Nearest finite E4M3, ties to the even code, saturating."""
    size = min(abs(x), 448.0)
    best = min(range(len(CODES)), key=lambda c: (abs(CODES[c] - size), c % 2))
    return math.copysign(CODES[best], x)


def e2m1(x: float) -> float:
    """Nearest E2M1, ties towards zero, saturating."""
    size = min(abs(x), 6.0)
    return math.copysign(min(E2M1, key=lambda v: (abs(v - size), v)), x)


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).to(torch.float32).item()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_tiles_match_the_definition(scale_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = torch.randn(5, 7)
    w[:4, :4] = 0
    q, scales = quantize_fp8_tiles(w, tile=4, scale_dtype=scale_dtype)
    assert (q.dtype, scales.dtype, q.shape, scales.shape) == (
        torch.float8_e4m3fn,
        scale_dtype,
        (5, 7),
        (2, 2),
    )
    for i in range(2):
        for j in range(2):
            tile = w[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            amax = max(float32(1e-4), tile.abs().max().item())
            expected = torch.tensor(float32(amax / 448)).to(scale_dtype)
            assert scales[i, j] == expected
            got = q[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].double()
            assert got.tolist() == [
                [e4m3(v / expected.item()) for v in row] for row in tile.double().tolist()
            ]
    decoded = dequantize_fp8_tiles(q, scales, tile=4)
    for r in range(5):
        for c in range(7):
            assert decoded[r, c] == q[r, c].double() * scales[r // 4, c // 4].double()


def test_fp8_tiles_of_stacked_matrices_are_those_of_each() -> None:
    w = torch.randn(3, 256, 128)
    q, scales = quantize_fp8_tiles(w)
    assert scales.shape == (3, 2, 1)
    for e in range(3):
        alone, alone_scales = quantize_fp8_tiles(w[e])
        assert torch.equal(q[e].view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scales[e], alone_scales)
    error = (dequantize_fp8_tiles(q, scales) - w.double()).abs()
    assert 0 < error.max() <= w.double().abs().max() / 16


def test_fp8_groups_match_the_definition() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 256).to(torch.bfloat16)
    x[1, :128] = 0
    q, scales = quantize_fp8_groups(x)
    for row in range(3):
        for group in range(2):
            values = x[row, 128 * group : 128 * group + 128].double()
            amax = max(float32(1e-10), values.abs().max().item())
            s = scales[row, group].item()
            assert s == float32(amax / 448)
            assert q[row, 128 * group : 128 * group + 128].double().tolist() == [
                e4m3(v / s) for v in values.tolist()
            ]
    decoded = dequantize_fp8_groups(q, scales)
    assert torch.equal(decoded[1, :128], torch.zeros(128, dtype=torch.float64))
    assert torch.equal(decoded[2, 128:], q[2, 128:].double() * scales[2, 1].double())


def test_nvfp4_matches_the_definition() -> None:
    torch.manual_seed(2)
    w = torch.randn(3, 64)
    w[0, :16] = 0
    w[1, 16:32] *= 1e-6  # its scale would round to zero
    packed, scales, g = quantize_nvfp4(w)
    assert (packed.shape, scales.shape, g.shape) == ((3, 32), (3, 4), ())
    assert (packed.dtype, scales.dtype, g.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    assert g.item() == float32(w.abs().max().item() / 2688)
    for row in range(3):
        for block in range(4):
            values = w[row, 16 * block : 16 * block + 16].double().tolist()
            s = max(e4m3(max(map(abs, values)) / (6 * g.item())), 2.0**-9)
            assert scales[row, block].double() == s
            decoded = dequantize_nvfp4_blocks(packed, scales)[row, 16 * block : 16 * block + 16]
            assert decoded.tolist() == [e2m1(v / (s * g.item())) * s for v in values]
    assert scales.float().max() == 448
    assert scales[0, 0] == scales[1, 1] == 2.0**-9


def test_nvfp4_activations_saturate_at_the_calibrated_range() -> None:
    x = torch.tensor([[1.0, -2.0, 100.0, *[0.0] * 13]]).to(torch.bfloat16)
    input_scale = torch.tensor(8.0 / 2688)  # calibrated to a largest input of 8
    packed, scales = quantize_nvfp4_blocks(x, input_scale)
    assert scales[0, 0] == 448
    decoded = dequantize_nvfp4_blocks(packed, scales) * input_scale.double()
    assert decoded[0, 2] == pytest.approx(8.0, rel=1e-6)
    assert decoded[0, 1] == pytest.approx(-2.0, rel=1e-6)
    assert quantize_nvfp4_blocks(x * torch.nan, input_scale)[1].float().isnan().all()


@pytest.mark.parametrize(("mn", "k"), [(1, 1), (3, 2), (4, 4), (6, 1), (1, 5)])
def test_mn_major_scales_keep_their_values_and_show_their_layout(mn: int, k: int) -> None:
    for leading in ((), (2,)):
        scales = torch.randn(*leading, mn, k)
        packed = to_mn_major(scales)
        assert torch.equal(packed, scales)
        assert packed.stride()[-2:] == (1, -(-mn // 4) * 4)
        assert is_mn_major(packed)
        assert not is_mn_major(scales)
        if leading:
            assert is_mn_major(packed[1])
            assert packed.stride(0) == packed.stride(-1) * k


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (130, 5), (256, 8), (40, 3)])
def test_swizzled_scales_lie_where_the_tile_order_says(rows: int, columns: int) -> None:
    codes = torch.randint(1, 127, (2, rows, columns), dtype=torch.uint8)
    swizzled = swizzle(codes.view(torch.float8_e4m3fn))
    assert swizzled.dtype == torch.float8_e4m3fn
    assert swizzled.shape == (2, -(-rows // 128) * 128, -(-columns // 4) * 4)
    across = swizzled.shape[-1] // 4
    flat = swizzled.view(torch.uint8).reshape(2, -1)
    expected = torch.zeros_like(flat)
    for r in range(rows):
        for c in range(columns):
            tile = r // 128 * across + c // 4
            expected[:, 512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = codes[:, r, c]
    assert torch.equal(flat, expected)
    assert torch.equal(unswizzle(swizzled, rows, columns).view(torch.uint8), codes)


def test_fp8_linear_is_the_product_of_the_decoded_tensors() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(300, 256).to(torch.bfloat16), torch.randn(384, 256)
    weight, scales = quantize_fp8_tiles(w)
    got = fp8_tiles_linear_partial(x, weight, to_mn_major(scales))
    q, x_scales = quantize_fp8_groups(x)
    wide_x = q.double() * x_scales.double().repeat_interleave(128, 1)
    wide_w = weight.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.allclose(got, wide_x @ wide_w.T, rtol=1e-13, atol=1e-13)
    exact = x.double() @ w.double().T
    assert 0.01 < (got - exact).norm() / exact.norm() < 0.06  # two roundings of three mantissa bits


def test_fp8_linear_refuses_scales_in_the_checkpoints_layout() -> None:
    weight, scales = quantize_fp8_tiles(torch.randn(256, 256))
    with pytest.raises(ValueError, match=r"strides \(2, 1\), as a checkpoint lays them out.*post-process"):
        fp8_tiles_linear_partial(torch.randn(1, 256).to(torch.bfloat16), weight, scales)


def test_nvfp4_linear_is_the_product_of_the_decoded_tensors() -> None:
    torch.manual_seed(4)
    x, w = torch.randn(5, 64).to(torch.bfloat16), torch.randn(48, 64)
    packed, scales, g = quantize_nvfp4(w)
    input_scale = torch.tensor(4.0 / 2688)
    alphas = (input_scale * g).expand(48)
    got = nvfp4_linear_partial(x, packed, swizzle(scales), alphas, input_scale)
    xp, xs = quantize_nvfp4_blocks(x, input_scale)
    exact = dequantize_nvfp4_blocks(xp, xs) @ dequantize_nvfp4_blocks(packed, scales).T
    assert torch.equal(got, exact * alphas.double())
    plain = x.double() @ w.double().T
    assert 0.05 < (got - plain).norm() / plain.norm() < 0.25


def test_products_do_not_depend_on_the_rows_beside_them() -> None:
    x = torch.randn(600, 128).to(torch.bfloat16)
    weight, scales = quantize_fp8_tiles(torch.randn(128, 128))
    packed = to_mn_major(scales)
    whole = fp8_tiles_linear_partial(x, weight, packed)
    some = fp8_tiles_linear_partial(x[299:301], weight, packed)
    assert torch.equal(round_to_bf16(whole[299:301]), round_to_bf16(some))
