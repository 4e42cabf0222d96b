"""Block formats against decoders and roundings written out from the formats' definitions."""

import math

import numpy as np
import pytest
import torch

from workloads.kernels.quantization import (
    decode_e2m1,
    decode_e8m0,
    dequantize_fp8_rows,
    dequantize_mxfp4,
    encode_e2m1,
    quantize_fp8_rows,
    quantize_mxfp4,
)

torch.set_num_threads(1)


def e4m3_value(byte: int) -> float:
    """OCP E4M3: bias 7, no infinity, 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = np.array([e4m3_value(b) for b in range(127)])  # the finite codes that are not negative


def e4m3_nearest(x: float) -> float:
    """Nearest E4M3 value of a number within range, ties to the even code."""
    distance = np.abs(E4M3 - abs(x))
    nearest = np.flatnonzero(distance == distance.min())
    code = next(c for c in nearest if len(nearest) == 1 or c % 2 == 0)
    return math.copysign(E4M3[code], x)


def ceil_log2(x: np.float32) -> int:
    mantissa, exponent = math.frexp(float(x))
    return exponent - 1 if mantissa == 0.5 else exponent


def activations() -> torch.Tensor:
    """Rows of very different size: ordinary, tiny, zero, at a power of two, one ulp above it, huge."""
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    x[1] *= 1e-6
    x[2] = 0
    x[3, :32] = 448.0
    x[4, :32] = torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))
    x[5] *= 1e30
    x[6, 5] = 2.0**-3 * 448
    return x


def test_fp8_rows_match_the_definition() -> None:
    x = activations()
    q, scales = quantize_fp8_rows(x)
    assert q.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.uint8
    for row, group in np.ndindex(8, 2):
        block = x[row, 32 * group : 32 * group + 32].numpy()
        amax = np.maximum(np.abs(block).max(), np.float32(1e-4))
        exponent = ceil_log2(amax / np.float32(448))
        assert scales[row, group] == exponent + 127
        expected = [e4m3_nearest(float(v) * 2.0**-exponent) for v in block]
        got = q[row, 32 * group : 32 * group + 32].to(torch.float64).tolist()
        assert got == expected


def test_fp8_scale_grows_only_above_the_largest_finite_value() -> None:
    _, scales = quantize_fp8_rows(activations())
    assert scales[3, 0] == 127
    assert scales[4, 0] == 128


def test_fp8_rounds_ties_to_even() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([448.0, 17.0, 19.0, -17.0])  # steps of 2 between 16 and 32
    q, _ = quantize_fp8_rows(x)
    assert q[0, :4].to(torch.float64).tolist() == [448.0, 16.0, 20.0, -16.0]


def test_fp8_takes_bfloat16_leading_dimensions_and_other_groups() -> None:
    x = torch.randn(2, 3, 128).to(torch.bfloat16)
    q, scales = quantize_fp8_rows(x, group=64)
    assert scales.shape == (2, 3, 2)
    flat_q, flat_scales = quantize_fp8_rows(x.float().reshape(6, 128), group=64)
    assert torch.equal(q.view(torch.uint8).reshape(6, 128), flat_q.view(torch.uint8))
    assert torch.equal(scales.reshape(6, 2), flat_scales)
    error = (dequantize_fp8_rows(q, scales) - x.double()).abs()
    assert error.max() <= x.double().abs().max() / 16  # half a step of three mantissa bits
    assert error.max() > 0


def test_fp8_keeps_nan_and_saturates_infinity() -> None:
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40], x[2, 1] = math.nan, math.inf, -math.inf
    q, scales = quantize_fp8_rows(x)
    decoded = dequantize_fp8_rows(q, scales)
    assert torch.isnan(decoded).nonzero().tolist() == [[0, 3]]
    assert scales.tolist() == [[254, 119], [119, 254], [254, 119]]
    assert decoded[1, 40] == 448 * 2.0**127
    assert decoded[2, 1] == -448 * 2.0**127


def test_fp8_refuses_a_partial_group() -> None:
    with pytest.raises(
        ValueError, match="The last dimension is 48, which is no multiple of the scale block 32"
    ):
        quantize_fp8_rows(torch.ones(1, 48))


def test_e8m0_decodes_every_byte() -> None:
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert values.dtype == torch.float64
    assert values[:255].tolist() == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert math.isnan(values[255])


def test_e2m1_decodes_every_code_low_nibble_first() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = magnitudes + [-m for m in magnitudes]
    decoded = decode_e2m1(torch.arange(256, dtype=torch.uint8).reshape(4, 64))
    expected = [values[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert decoded.shape == (4, 128)
    assert decoded.flatten().tolist() == expected
    assert math.copysign(1.0, decoded.flatten()[2 * 8]) == -1.0  # code 8 is minus zero


def test_e2m1_encodes_its_own_values_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode_e2m1(decode_e2m1(codes | codes << 4)[0::2]), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e2m1_rounds_to_nearest_and_midpoints_towards_zero(dtype: torch.dtype) -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    above = torch.nextafter(midpoints, torch.full_like(midpoints, 9.0))
    assert encode_e2m1(midpoints).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert encode_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert encode_e2m1(-above).tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert encode_e2m1(torch.tensor([1e9, -1e9], dtype=dtype)).tolist() == [7, 15]


def test_mxfp4_matches_the_definition() -> None:
    torch.manual_seed(1)
    w = torch.randn(2, 3, 64) * torch.tensor([1e-30, 0.02, 50.0]).reshape(1, 3, 1)
    w[0, 0, :32] = 0
    w[1, 1, :32] = w[1, 1, :32].clamp(-1, 1) * 6.0
    packed, scales = quantize_mxfp4(w)
    assert (packed.shape, scales.shape) == ((2, 3, 32), (2, 3, 2))
    assert (packed.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    decoded = dequantize_mxfp4(packed, scales)
    grid = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for e, n, g in np.ndindex(2, 3, 2):
        block = w[e, n, 32 * g : 32 * g + 32].numpy()
        amax = np.maximum(np.abs(block).max(), np.float32(6 * 2.0**-126))
        exponent = ceil_log2(amax / np.float32(6))
        assert scales[e, n, g] == exponent + 127
        for column, value in enumerate(block.astype(np.float64) * 2.0**-exponent):
            nearest = grid[np.argmin(np.abs(grid - abs(value)))]  # argmin takes the lower one of a tie
            assert decoded[e, n, 32 * g + column] == math.copysign(nearest, value) * 2.0**exponent


def test_mxfp4_scale_of_a_block_at_and_above_six() -> None:
    w = torch.full((1, 32), 6.0)
    above = torch.nextafter(w, torch.full_like(w, 9.0))
    assert quantize_mxfp4(w)[1].item() == 127
    assert quantize_mxfp4(above)[1].item() == 128


def test_mxfp4_of_decoded_values_is_the_identity() -> None:
    torch.manual_seed(2)
    packed = torch.randint(0, 256, (4, 32), dtype=torch.uint8)
    packed[:, 0::16] = 0x7F  # every block holds a 6, so its scale is determined
    scales = torch.randint(90, 160, (4, 2), dtype=torch.uint8)
    again = quantize_mxfp4(dequantize_mxfp4(packed, scales))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_mxfp4_marks_what_is_not_finite_in_the_scale(bad: float) -> None:
    w = torch.ones(2, 64)
    w[1, 40] = bad
    packed, scales = quantize_mxfp4(w)
    assert scales.tolist() == [[125, 125], [125, 255]]
    decoded = dequantize_mxfp4(packed, scales)
    assert torch.isnan(decoded[1, 32:]).all()
    assert not torch.isnan(decoded[1, :32]).any()


def test_mxfp4_scale_byte_255_makes_even_zeros_nan() -> None:
    decoded = dequantize_mxfp4(
        torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)
    )
    assert torch.isnan(decoded).all()
