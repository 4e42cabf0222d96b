"""Latent attention: both forms against a naive one and against each other, bit for bit after rounding."""

import math
from typing import NamedTuple

import pytest
import torch

from workloads.kernels import mla as mla_module
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.mla import mla_absorbed, mla_expanded, mla_output, split_kv_b

torch.set_num_threads(1)

N, P, R, V, L = 4, 32, 16, 24, 64  # V differs from P, so that a swapped split shows


class Case(NamedTuple):
    q: torch.Tensor
    c: torch.Tensor
    k_pe: torch.Tensor
    kv_b: torch.Tensor


def case(tokens: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def bf16(scale: float, *shape: int) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(torch.bfloat16)

    return Case(bf16(2, tokens, N, P + R), bf16(1, tokens, L), bf16(2, tokens, R), bf16(0.2, N * (P + V), L))


def naive(x: Case, t: int) -> torch.Tensor:
    """Attention of token t over tokens 0..t, one head and one key at a time; float64 [N,V]."""
    out = torch.zeros(N, V, dtype=torch.float64)
    for n in range(N):
        rows = x.kv_b[n * (P + V) : (n + 1) * (P + V)].double()
        scores, values = [], []
        for s in range(t + 1):
            key_value = rows @ x.c[s].double()
            nope = (key_value[:P] * x.q[t, n, :P].double()).sum()
            shared = (x.k_pe[s].double() * x.q[t, n, P:].double()).sum()
            scores.append(float(nope + shared) / math.sqrt(P + R))
            values.append(key_value[P:])
        weights = [math.exp(score - max(scores)) for score in scores]
        for weight, value in zip(weights, values, strict=True):
            out[n] += weight / math.fsum(weights) * value
    return out


def test_expanded_equals_naive() -> None:
    x = case(20)
    expected = torch.stack([naive(x, t) for t in range(20)])
    assert torch.equal(mla_expanded(*x, 0), round_to_bf16(expected))


@pytest.mark.parametrize("cuts", [[1], [7], [10, 11], [0], [30]])
def test_expanded_segments_equal_the_whole(cuts: list[int]) -> None:
    x = case(30)
    parts = [
        mla_expanded(x.q[low:high], x.c[:high], x.k_pe[:high], x.kv_b, low)
        for low, high in zip([0, *cuts], [*cuts, 30], strict=True)
    ]
    assert torch.equal(torch.cat(parts), mla_expanded(*x, 0))


def test_expanded_ignores_the_cache_behind_the_segment() -> None:
    x = case(12)
    unwritten = torch.full((5, 1), math.nan, dtype=torch.bfloat16)
    c, k_pe = torch.cat([x.c, unwritten.expand(5, L)]), torch.cat([x.k_pe, unwritten.expand(5, R)])
    assert torch.equal(mla_expanded(x.q[4:], c, k_pe, x.kv_b, 4), mla_expanded(*x, 0)[4:])


def test_expanded_in_blocks_of_queries_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    x = case(50)
    whole = mla_expanded(*x, 0)
    monkeypatch.setattr(mla_module, "_SCORE_BYTES", 7 * 8 * N * 50)
    assert torch.equal(mla_expanded(*x, 0), whole)
    monkeypatch.setattr(mla_module, "_SCORE_BYTES", 0)
    assert torch.equal(mla_expanded(*x, 0), whole)


def test_expanded_refuses_a_cache_without_the_segment() -> None:
    x = case(6)
    with pytest.raises(ValueError, match="ends at position 9 and the cache holds 6"):
        mla_expanded(*x, 3)


def test_absorbed_equals_expanded_bit_for_bit_at_every_position() -> None:
    x = case(300)
    lengths = range(1, 301)
    caches = x.c.expand(300, -1, -1), x.k_pe.expand(300, -1, -1)
    absorbed = mla_absorbed(x.q, *caches, *split_kv_b(x.kv_b, N, P), lengths)
    assert torch.equal(absorbed, mla_expanded(*x, 0))


def test_absorbed_requests_do_not_see_each_other_nor_unwritten_cache() -> None:
    cases, lengths = [case(9, seed=1), case(5, seed=2), case(1, seed=3)], [9, 5, 1]
    cases = [x._replace(kv_b=cases[0].kv_b) for x in cases]
    expected = torch.stack([mla_expanded(*x, 0)[-1] for x in cases])
    weights, q = split_kv_b(cases[0].kv_b, N, P), torch.stack([x.q[-1] for x in cases])
    ragged = mla_absorbed(q, [x.c for x in cases], [x.k_pe for x in cases], *weights, lengths)
    assert torch.equal(ragged, expected)
    c = torch.full((3, 16, L), math.nan, dtype=torch.bfloat16)
    k_pe = torch.full((3, 16, R), math.nan, dtype=torch.bfloat16)
    for b, x in enumerate(cases):
        c[b, : lengths[b]], k_pe[b, : lengths[b]] = x.c, x.k_pe
    assert torch.equal(mla_absorbed(q, c, k_pe, *weights, lengths), expected)


def test_stale_absorbed_weights_change_the_output() -> None:
    """What decode reads is derived: an update of kv_b that does not refresh it must show, part by part."""
    x = case(9)
    w_uk_t, w_uv = split_kv_b(x.kv_b, N, P)
    fresh_uk_t, fresh_uv = split_kv_b(x.kv_b * 2, N, P)
    args = x.q[-1:], x.c.unsqueeze(0), x.k_pe.unsqueeze(0)
    fresh = mla_absorbed(*args, fresh_uk_t, fresh_uv, [9])
    assert torch.equal(fresh[0], mla_expanded(x.q, x.c, x.k_pe, x.kv_b * 2, 0)[-1])
    assert not torch.equal(mla_absorbed(*args, w_uk_t, fresh_uv, [9]), fresh)
    assert not torch.equal(mla_absorbed(*args, fresh_uk_t, w_uv, [9]), fresh)


@pytest.mark.parametrize("heads", [1, N])
def test_split_copies_and_inverts(heads: int) -> None:
    kv_b = case(1).kv_b[: heads * (P + V)].clone()
    w_uk_t, w_uv = split_kv_b(kv_b, heads, P)
    assert w_uk_t.shape == (heads, P, L)
    assert w_uv.shape == (heads, L, V)
    assert w_uk_t.is_contiguous()
    assert w_uv.is_contiguous()
    assert torch.equal(torch.cat([w_uk_t, w_uv.transpose(1, 2)], dim=1).view_as(kv_b), kv_b)
    kept = w_uk_t.clone(), w_uv.clone()
    kv_b.zero_()
    assert torch.equal(w_uk_t, kept[0])
    assert torch.equal(w_uv, kept[1])


def test_no_tokens() -> None:
    x = case(0)
    assert mla_expanded(*x, 0).shape == (0, N, V)
    assert mla_absorbed(x.q, [], [], *split_kv_b(x.kv_b, N, P), []).shape == (0, N, V)


def test_output_gate_equals_formula() -> None:
    generator = torch.Generator().manual_seed(4)
    o, gate = (torch.randn(5, N, V, generator=generator).to(torch.bfloat16) for _ in range(2))
    pairs = zip(o.flatten().tolist(), gate.flatten().tolist(), strict=True)
    expected = torch.tensor([a / (1 + math.exp(-b)) for a, b in pairs], dtype=torch.float64)
    assert torch.equal(mla_output(o, gate).flatten(), round_to_bf16(expected))
