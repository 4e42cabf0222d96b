"""Rotary embeddings and grouped-query attention against plain float64 references."""

import math

import pytest
import torch

from workloads.kernels.gqa import gqa_attention
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.rope import (
    rope_frequencies,
    rope_rows,
    rotate_half_split,
    yarn_concentration,
    yarn_frequencies,
)

GPT_OSS = (64, 150000.0, 32.0, 4096, 32.0, 1.0)  # dim, theta, factor, original, beta_fast, beta_slow


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def test_yarn_of_gpt_oss_pair_by_pair() -> None:
    low = 32 * math.log(4096 / (32 * 2 * math.pi)) / math.log(150000)
    high = 32 * math.log(4096 / (2 * math.pi)) / math.log(150000)
    expected = []
    for i in range(32):
        frequency = 150000 ** (-2 * i / 64)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(frequency / 32 * ramp + frequency * (1 - ramp))
    found = yarn_frequencies(*GPT_OSS)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    plain = rope_frequencies(64, 150000.0)
    assert torch.equal(found[:8], plain[:8])  # 8.1 is where the blend begins, 17.4 where it ends
    torch.testing.assert_close(found[18:], plain[18:] / 32, rtol=1e-15, atol=0)
    assert yarn_concentration(32.0) == pytest.approx(1.3465735902799727, abs=1e-15)


def test_rotation_turns_each_pair_by_its_angle_and_keeps_distances() -> None:
    x, frequencies = random(5, 2, 8), rope_frequencies(8, 100.0)
    found = rotate_half_split(x, rope_rows(torch.arange(3, 8), frequencies, 1.25))
    for t in range(5):
        for i in range(4):
            pair = torch.complex(x[t, :, i].double(), x[t, :, i + 4].double())
            turned = pair * 1.25 * torch.exp(1j * (t + 3) * frequencies[i])
            assert torch.equal(found[t, :, i], round_to_bf16(turned.real))
            assert torch.equal(found[t, :, i + 4], round_to_bf16(turned.imag))


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, sinks: torch.Tensor | None, window: int
) -> torch.Tensor:
    """One query and one head at a time, over the keys it sees and no others."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for t in range(q.shape[0]):
        for n in range(q.shape[1]):
            position, head = start + t, n * k.shape[1] // q.shape[1]
            seen = slice(max(0, position - window + 1), position + 1)
            scores = [float(q[t, n].double() @ key.double()) / math.sqrt(q.shape[2]) for key in k[seen, head]]
            extra = [] if sinks is None else [float(sinks[n])]
            weights = torch.tensor(scores + extra, dtype=torch.float64).softmax(0)[: len(scores)]
            out[t, n] = weights @ v[seen, head].double()
    return round_to_bf16(out)


@pytest.mark.parametrize("sinks", [None, random(6, seed=4)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 20), (13, 1), (13, 20)])
def test_attention_equals_the_reference(
    sinks: torch.Tensor | None, window: int | None, start: int, tokens: int
) -> None:
    q, k, v = random(tokens, 6, 16, seed=1), random(40, 2, 16, seed=2), random(40, 2, 24, seed=3)
    found = gqa_attention(q, k, v, start, sinks, window)
    assert torch.equal(found, reference(q, k, v, start, sinks, window or 1000))


def test_blocks_of_queries_do_not_show() -> None:
    """700 queries are computed in blocks; each equals the query alone."""
    q, k, v = random(700, 2, 8, seed=1), random(700, 1, 8, seed=2), random(700, 1, 8, seed=3)
    for window in (None, 30):
        together = gqa_attention(q, k, v, 0, window=window)
        for t in (0, 255, 256, 257, 511, 699):
            assert torch.equal(together[t : t + 1], gqa_attention(q[t : t + 1], k, v, t, window=window))


def test_a_sink_takes_weight_and_adds_nothing() -> None:
    q, k, v = random(3, 2, 8), random(3, 2, 8, seed=1), torch.ones(3, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(gqa_attention(q, k, v, 0), torch.ones(3, 2, 8, dtype=torch.bfloat16))
    assert (gqa_attention(q, k, v, 0, sinks=torch.tensor([0.0, 30.0]))[:, 0] < 1).all()
    assert (gqa_attention(q, k, v, 0, sinks=torch.tensor([0.0, 30.0]))[:, 1] < 1e-6).all()


def test_keys_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="end at position 9 and the cache holds 8"):
        gqa_attention(random(4, 2, 8), random(8, 2, 8), random(8, 2, 8), 5)
