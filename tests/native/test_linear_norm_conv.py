"""Rounding to BF16, matrix products, normalisations and the causal convolution against exact or naive forms."""

import math
from fractions import Fraction

import pytest
import torch

from workloads.kernels import blocks
from workloads.kernels import linear as linear_module
from workloads.kernels.conv import conv_decode, conv_prefill, tap_major_weight
from workloads.kernels.linear import linear, linear_partial, round_to_bf16
from workloads.kernels.norm import l2_normalise, rms_norm

torch.set_num_threads(1)

MAX_CODE = 0x7F7F  # largest finite BF16; the next code is infinity


def bf16_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16).to(torch.int32) & 0xFFFF


def code_value(code: int) -> Fraction:
    """Exact value of a non-negative BF16 code; infinity's code stands for 2^128, the value after the largest."""
    exponent, fraction = code >> 7, code & 0x7F
    if exponent == 0:
        return Fraction(fraction) * Fraction(2) ** -133
    return Fraction(128 + fraction) * Fraction(2) ** (exponent - 134)


def nearest_code(x: float) -> int:
    """Code of the BF16 nearest to x by exact arithmetic, ties to the even code, sign included."""
    magnitude = abs(Fraction(x))
    low, high = 0, MAX_CODE + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if code_value(middle) <= magnitude else (low, middle)
    below, above = magnitude - code_value(low), code_value(high) - magnitude
    code = low if below < above or (below == above and low % 2 == 0) else high
    return code | (0x8000 if math.copysign(1, x) < 0 else 0)


def all_midpoints() -> tuple[torch.Tensor, torch.Tensor]:
    """Every positive BF16 code but infinity's, and the value halfway to the next code."""
    codes = torch.arange(MAX_CODE + 1, dtype=torch.int32)
    values = codes.to(torch.int16).view(torch.bfloat16).to(torch.float64)
    following = torch.cat([values[1:], torch.tensor([2.0**128], dtype=torch.float64)])
    return codes, (values + following) / 2


def random_bf16(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def test_every_bf16_value_rounds_to_itself() -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32)
    values = codes.to(torch.int16).view(torch.bfloat16)
    number = ~values.isnan()
    assert torch.equal(bf16_bits(round_to_bf16(values.to(torch.float64)))[number], codes[number])


@pytest.mark.parametrize("sign", [1, -1])
def test_every_tie_goes_to_even_and_its_neighbours_to_their_side(sign: int) -> None:
    codes, middle = all_midpoints()
    flag = 0x8000 if sign < 0 else 0
    infinity = torch.tensor(math.inf, dtype=torch.float64)
    assert torch.equal(bf16_bits(round_to_bf16(sign * middle)), (codes + codes % 2) | flag)
    assert torch.equal(bf16_bits(round_to_bf16(sign * torch.nextafter(middle, -infinity))), codes | flag)
    assert torch.equal(bf16_bits(round_to_bf16(sign * torch.nextafter(middle, infinity))), (codes + 1) | flag)


def test_rounding_equals_exact_rational_rounding_of_random_doubles() -> None:
    generator = torch.Generator().manual_seed(0)
    significands = 1 + torch.rand(4000, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-160, 132, (4000,), generator=generator).to(torch.float64)
    x = significands * torch.exp2(exponents) * (torch.randint(0, 2, (4000,), generator=generator) * 2 - 1)
    assert bf16_bits(round_to_bf16(x)).tolist() == [nearest_code(v) for v in x.tolist()]


def test_double_rounding_trap() -> None:
    """Values that float32 turns into a tie: torch's own cast gets them wrong, which is why ours exists."""
    trap = torch.tensor([1 + 2**-8 + 2**-30, 1 + 3 * 2**-8 - 2**-30], dtype=torch.float64)
    assert round_to_bf16(trap).tolist() == [1 + 2**-7, 1 + 2**-7]
    assert trap.to(torch.bfloat16).tolist() == [1, 1 + 2**-6]


def test_special_values_and_layouts_survive_rounding() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e-300], dtype=torch.float64)
    assert [str(v) for v in round_to_bf16(x).tolist()] == ["0.0", "-0.0", "inf", "-inf", "nan", "inf", "-0.0"]
    grid = torch.arange(12, dtype=torch.float64).view(3, 4) + 2**-20
    assert torch.equal(round_to_bf16(grid.t()), round_to_bf16(grid).t())
    assert round_to_bf16(torch.empty(0, 3, dtype=torch.float64)).shape == (0, 3)


def test_linear_is_the_exact_product_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = random_bf16(generator, 3, 40), random_bf16(generator, 5, 40)
    exact = [
        [
            sum(Fraction(a) * Fraction(b) for a, b in zip(row, column, strict=True))
            for column in weight.tolist()
        ]
        for row in x.tolist()
    ]
    expected = [[nearest_code(float(value)) for value in row] for row in exact]  # these sums fit in a double
    assert all(Fraction(float(value)) == value for row in exact for value in row)
    assert bf16_bits(linear(x, weight)).tolist() == expected


def test_linear_does_not_depend_on_sharding_batch_or_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = random_bf16(generator, 64, 512), random_bf16(generator, 96, 512)
    whole = linear(x, weight)
    parts = [linear_partial(a, b) for a, b in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
    assert torch.equal(round_to_bf16(parts[0] + parts[1] + parts[2] + parts[3]), whole)
    assert torch.equal(torch.cat([linear(x, part) for part in weight.chunk(3)], dim=1), whole)
    assert torch.equal(torch.cat([linear(row, weight) for row in x.chunk(64)]), whole)
    monkeypatch.setattr(blocks, "ROWS", 5)
    assert torch.equal(linear(x, weight), whole)
    monkeypatch.setattr(linear_module, "_WEIGHT_BYTES", 7 * 8 * 512)  # blocks of 7 rows, the last one of 5
    assert torch.equal(linear(x, weight), whole)
    halves = [a.float() @ b.float().t() for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    assert not torch.equal((halves[0] + halves[1]).to(torch.bfloat16), whole)  # float32 sums would show here


def test_linear_of_no_tokens_and_of_mismatched_shards() -> None:
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    assert linear(torch.zeros(0, 4, dtype=torch.bfloat16), weight).shape == (0, 6)
    with pytest.raises(ValueError, match="has 8 columns and the weight 4"):
        linear(torch.zeros(2, 8, dtype=torch.bfloat16), weight)


def test_norms_equal_naive_loops() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = random_bf16(generator, 4, 33), torch.randn(33, generator=generator)
    for row, ours, unit in zip(x.tolist(), rms_norm(x, weight, 1e-3), l2_normalise(x), strict=True):
        root = math.sqrt(math.fsum(v * v for v in row) / len(row) + 1e-3)
        expected = [nearest_code(v / root * w) for v, w in zip(row, weight.tolist(), strict=True)]
        assert bf16_bits(ours).tolist() == expected
        length = math.sqrt(math.fsum(v * v for v in row) + 1e-6)
        assert unit.tolist() == pytest.approx([v / length for v in row], rel=1e-14)
    tiny = torch.full((1, 4), 1e-3, dtype=torch.bfloat16)  # here eps decides
    assert l2_normalise(tiny).square().sum().item() == pytest.approx(0.8, rel=1e-2)


def naive_conv(x: list[list[float]], weight: list[list[float]], past: list[list[float]]) -> list[list[float]]:
    """SiLU(sum_j w[c][j] x[t - 3 + j][c]) with `past[c]` before the first token."""
    out = []
    for t in range(len(x)):
        row = []
        for c, taps in enumerate(weight):
            inputs = [x[s][c] if s >= 0 else past[c][3 + s] for s in range(t - 3, t + 1)]
            total = math.fsum(a * b for a, b in zip(inputs, taps, strict=True))
            row.append(total / (1 + math.exp(-total)))
        out.append(row)
    return out


def test_conv_prefill_equals_naive_and_returns_the_last_inputs() -> None:
    generator = torch.Generator().manual_seed(4)
    x, past = random_bf16(generator, 9, 6), random_bf16(generator, 6, 3)
    weight = torch.randn(6, 4, generator=generator)
    out, state = conv_prefill(x, weight, past)
    naive = naive_conv(x.tolist(), weight.tolist(), past.tolist())
    assert bf16_bits(out).tolist() == [[nearest_code(v) for v in row] for row in naive]
    assert torch.equal(state, x[-3:].t())


@pytest.mark.parametrize("cuts", [[0], [1], [2], [1, 2, 3], [5, 5], [16]])
def test_conv_segments_carry_their_state(cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = random_bf16(generator, 16, 6), torch.randn(6, 4, generator=generator)
    start = random_bf16(generator, 6, 3)
    whole, last = conv_prefill(x, weight, start)
    parts, state = [], start
    for low, high in zip([0, *cuts], [*cuts, 16], strict=True):
        out, state = conv_prefill(x[low:high], weight, state)
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("groups", [1, 3])
def test_conv_decode_of_many_requests_equals_prefill_of_each(groups: int) -> None:
    generator = torch.Generator().manual_seed(6)
    x, weight = random_bf16(generator, 5, 7, 12), torch.randn(12, 4, generator=generator)
    start = random_bf16(generator, 5, 12, 3)
    taps = tap_major_weight(weight, groups)
    assert taps.shape == (groups, 4, 12 // groups)
    state, outs = start, []
    for t in range(7):
        out, state = conv_decode(x[:, t], taps, state)
        outs.append(out)
    for b in range(5):
        expected, last = conv_prefill(x[b], weight, start[b])
        assert torch.equal(torch.stack(outs)[:, b], expected)
        assert torch.equal(state[b], last)


def test_tap_major_weight_is_a_copy_that_must_be_refreshed() -> None:
    for groups in (1, 3):
        weight = torch.arange(12.0).view(3, 4)
        taps = tap_major_weight(weight, groups)
        assert taps[groups - 1, 3, -1] == 11
        weight.zero_()
        assert taps[groups - 1, 3, -1] == 11
