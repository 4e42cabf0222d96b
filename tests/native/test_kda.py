"""Kimi delta attention: all forms against a naive one, against each other, and as an engine chains them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from workloads.kernels.kda import kda_chunked, kda_decode, kda_gate, kda_output, kda_recurrent
from workloads.kernels.linear import round_to_bf16

torch.set_num_threads(1)

EPS = 1e-5
Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Segment(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def cut(self, low: int, high: int) -> "Segment":
        return Segment(*(x[:, low:high] for x in self))


def segment(heads: int, tokens: int, dk: int, dv: int, lower_bound: float = -5.0, seed: int = 0) -> Segment:
    """Random BF16 q, k, v as after SiLU, and gates from barely to fully decaying."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.silu(normal(heads, tokens, dk)).to(torch.bfloat16) for _ in range(2))
    v = torch.nn.functional.silu(normal(heads, tokens, dv)).to(torch.bfloat16)
    g = lower_bound * torch.sigmoid(4 * normal(heads, tokens, dk) - 2)
    return Segment(q, k, v, g, torch.sigmoid(2 * normal(heads, tokens)))


def random_state(heads: int, dk: int, dv: int) -> torch.Tensor:
    return torch.randn(heads, dk, dv, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def naive(s: Segment, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as one matrix per token: S = (I - beta k k^T) Diag(exp g) S + beta k v^T; o = S^T q."""
    heads, tokens, dk = s.q.shape
    out = torch.zeros(heads, tokens, s.v.shape[2], dtype=torch.float64)
    last = []
    for h in range(heads):
        S = state[h].double()
        for t in range(tokens):
            q, k, v = (x[h, t].double() for x in (s.q, s.k, s.v))
            q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(dk)
            k = k / math.sqrt(float(k @ k) + 1e-6)
            beta = float(s.beta[h, t])
            transition = (torch.eye(dk, dtype=torch.float64) - beta * torch.outer(k, k)) @ s.g[
                h, t
            ].exp().diag()
            S = transition @ S + beta * torch.outer(k, v)
            out[h, t] = S.t() @ q
        last.append(S)
    return out, torch.stack(last)


def close(ours: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(ours, other, rtol=1e-12, atol=1e-12)


def test_gate_equals_formula_ignores_the_padded_tail_and_is_bounded() -> None:
    generator = torch.Generator().manual_seed(1)
    f_out = torch.randn(3, 2, 4, generator=generator).mul(3).to(torch.bfloat16)
    a_log, dt_bias = torch.tensor([0.5, -1.0, math.nan]), torch.randn(8, generator=generator)
    g = kda_gate(f_out, a_log, dt_bias, -5.0)
    for t, h, d in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(4)).tolist():
        z = math.exp(float(a_log[h])) * (float(f_out[t, h, d]) + float(dt_bias[h * 4 + d]))
        assert g[t, h, d].item() == pytest.approx(-5 / (1 + math.exp(-z)), rel=1e-13)
    assert torch.equal(kda_gate(f_out, a_log, dt_bias.view(2, 4), -5.0), g)
    extreme = torch.full((1, 2, 4), 1e4, dtype=torch.bfloat16)
    assert kda_gate(extreme, a_log, dt_bias, -5.0).eq(-5).all()
    assert kda_gate(-extreme, a_log, dt_bias, -5.0).eq(0).all()
    with pytest.raises(ValueError, match="A_log has 1 entries and the gate 2 heads"):
        kda_gate(f_out, a_log[:1], dt_bias, -5.0)


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunked])
@pytest.mark.parametrize("tokens", [0, 1, 3, 70])
def test_forms_equal_the_naive_recurrence(form: Form, tokens: int) -> None:
    s, start = segment(2, tokens, 8, 6), random_state(2, 8, 6)
    before = start.clone()
    out, last = form(*s, start)
    expected, expected_last = naive(s, start)
    assert close(out, expected)
    assert close(last, expected_last)
    assert torch.equal(start, before)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunked_equals_recurrent(tokens: int) -> None:
    s, start = segment(3, tokens, 16, 16), random_state(3, 16, 16)
    out, last = kda_chunked(*s, start)
    expected, expected_last = kda_recurrent(*s, start)
    assert close(out, expected)
    assert close(last, expected_last)


@pytest.mark.parametrize("chunk", [1, 7, 16, 500])
def test_any_chunk_gives_the_same(chunk: int) -> None:
    s, start = segment(2, 100, 8, 8), random_state(2, 8, 8)
    out, last = kda_chunked(*s, start, chunk=chunk)
    expected, expected_last = kda_recurrent(*s, start)
    assert close(out, expected)
    assert close(last, expected_last)


def test_chunk_must_be_positive() -> None:
    with pytest.raises(ValueError, match="The chunk is 0 tokens"):
        kda_chunked(*segment(1, 4, 8, 8), random_state(1, 8, 8), chunk=0)


@pytest.mark.parametrize("cut", [1, 31, 63, 64, 65, 128, 149])
def test_segments_may_be_cut_anywhere(cut: int) -> None:
    s, start = segment(2, 150, 8, 8), random_state(2, 8, 8)
    first, middle = kda_chunked(*s.cut(0, cut), start)
    second, last = kda_chunked(*s.cut(cut, 150), middle)
    expected, expected_last = kda_recurrent(*s, start)
    assert close(torch.cat([first, second], dim=1), expected)
    assert close(last, expected_last)


@pytest.mark.parametrize("lower_bound", [-5.0, -40.0])
def test_strong_decay_neither_overflows_nor_loses_digits(lower_bound: float) -> None:
    """exp(-G) of a whole chunk, the naive factor, is e^320 at -5 a token and infinite in float64 at -40."""
    s, start = segment(2, 130, 8, 8, lower_bound), random_state(2, 8, 8)
    g = s.g.clone()
    g[0] = lower_bound  # all of one head decays fully at every token, and one channel of the other not at all
    g[1, :, 0] = 0
    s = s._replace(g=g)
    out, last = kda_chunked(*s, start)
    expected, expected_last = kda_recurrent(*s, start)
    assert close(out, expected)
    assert close(last, expected_last)


def test_repeated_keys_stay_accurate() -> None:
    """The triangular system is at its worst when every token writes to the same key with beta near 1."""
    s, start = segment(1, 128, 8, 8), random_state(1, 8, 8)
    ones = torch.ones_like(s.beta)
    s = s._replace(k=s.k[:, :1].expand_as(s.k), g=torch.zeros_like(s.g), beta=0.999 * ones)
    out, _ = kda_chunked(*s, start)
    assert close(out, kda_recurrent(*s, start)[0])


def test_decode_updates_each_request_of_a_batch_alone() -> None:
    s, start = segment(4, 5, 8, 6), random_state(4, 8, 6)

    def by_request(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 2, *x.shape[1:])  # 4 heads as 2 requests of 2 heads

    state, outs = by_request(start), []
    before = state.clone()
    for t in range(5):
        out, state = kda_decode(*Segment(*(by_request(x)[:, :, t] for x in s)), state)
        outs.append(out.flatten(0, 1))
    expected, expected_last = kda_recurrent(*s, start)
    assert close(torch.stack(outs, dim=1), expected)
    assert close(state.flatten(0, 1), expected_last)
    assert torch.equal(by_request(start), before)


def test_output_equals_formula_and_rounds_o_as_the_kernel_stores_it() -> None:
    generator = torch.Generator().manual_seed(2)
    o = torch.randn(3, 2, 8, generator=generator, dtype=torch.float64)
    weight = torch.rand(8, generator=generator)
    gate = torch.randn(3, 2, 8, generator=generator).to(torch.bfloat16)
    ours = kda_output(o, weight, gate, EPS)
    stored = round_to_bf16(o)
    assert torch.equal(ours, kda_output(stored, weight, gate, EPS))
    for t in range(3):
        for h in range(2):
            row = stored[t, h].tolist()
            root = math.sqrt(math.fsum(x * x for x in row) / 8 + EPS)
            values = zip(row, weight.tolist(), gate[t, h].tolist(), strict=True)
            naive_row = [x / root * w / (1 + math.exp(-z)) for x, w, z in values]
            assert torch.equal(ours[t, h], round_to_bf16(torch.tensor(naive_row, dtype=torch.float64)))


def as_engine(s: Segment, cuts: list[int], prefilled: int, dtype: torch.dtype) -> torch.Tensor:
    """BF16 output of an engine that prefills up to `prefilled` in pieces ending at `cuts`, then decodes,
    and stores its state in `dtype` between calls."""
    heads, tokens, dv = s.v.shape
    state, outs = torch.zeros(heads, s.q.shape[2], dv, dtype=dtype), []
    for low, high in zip([0, *cuts], [*cuts, prefilled], strict=True):
        out, wide = kda_chunked(*s.cut(low, high), state)
        state = wide.to(dtype)
        outs.append(out)
    for t in range(prefilled, tokens):
        out, wide = kda_decode(*Segment(*(x[:, t].unsqueeze(0) for x in s)), state.unsqueeze(0))
        state = wide[0].to(dtype)
        outs.append(out.transpose(0, 1))
    o = torch.cat(outs, dim=1).transpose(0, 1)
    gate = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    return kda_output(o, torch.ones(dv), gate, EPS)


def test_prefill_then_decode_equals_decode_only_bit_for_bit() -> None:
    s = segment(4, 384, 32, 32, seed=5)
    decoded = as_engine(s, [], 0, torch.float64)
    assert torch.equal(as_engine(s, [], 300, torch.float64), decoded)
    assert torch.equal(as_engine(s, [100, 164], 300, torch.float64), decoded)


def test_a_float32_state_would_not_be_enough() -> None:
    """Why the engine keeps float64: storing float32 at other tokens changes some BF16 outputs."""
    s = segment(4, 384, 32, 32, seed=5)
    decoded = as_engine(s, [], 0, torch.float32)
    different = as_engine(s, [], 300, torch.float32) != decoded
    assert 0 < int(different.sum()) < decoded.numel() // 1000
