"""The mix of residual snapshots against a naive one, token by token."""

import math

import torch

from workloads.kernels.attention_residual import attention_residual_mix
from workloads.kernels.linear import round_to_bf16

torch.set_num_threads(1)

EPS = 1e-5


def streams(count: int, tokens: int = 5, hidden: int = 24) -> list[torch.Tensor]:
    """BF16 [tokens,hidden] each, of growing size: the weights must not depend on it, and the sum must."""
    generator = torch.Generator().manual_seed(count)
    return [
        (2.0**i * torch.randn(tokens, hidden, generator=generator)).to(torch.bfloat16) for i in range(count)
    ]


def weights(hidden: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    norm = 1 + torch.randn(hidden, generator=generator) / 4
    return norm, torch.randn(1, hidden, generator=generator).to(torch.bfloat16)


def naive_token(values: list[list[float]], norm: list[float], proj: list[float]) -> list[float]:
    logits = []
    for v in values:
        root = math.sqrt(math.fsum(x * x for x in v) / len(v) + EPS)
        logits.append(math.fsum(x / root * n * p for x, n, p in zip(v, norm, proj, strict=True)))
    shares = [math.exp(x - max(logits)) for x in logits]
    total = math.fsum(shares)
    return [
        math.fsum(s / total * v[h] for s, v in zip(shares, values, strict=True)) for h in range(len(norm))
    ]


def test_mix_equals_naive() -> None:
    norm, proj = weights()
    for count in (2, 3, 9):
        *blocks, prefix = streams(count)
        ours = attention_residual_mix(blocks, prefix, norm, proj, EPS)
        rows = [
            naive_token([s[t].tolist() for s in [*blocks, prefix]], norm.tolist(), proj[0].tolist())
            for t in range(5)
        ]
        assert torch.equal(ours, round_to_bf16(torch.tensor(rows, dtype=torch.float64)))
        assert torch.equal(attention_residual_mix(blocks, prefix, norm, proj.view(-1), EPS), ours)


def test_without_blocks_the_mix_is_the_prefix() -> None:
    norm, proj = weights()
    (prefix,) = streams(1)
    assert torch.equal(attention_residual_mix([], prefix, norm, proj, EPS), prefix)


def test_equal_streams_mix_to_themselves_and_zero_projection_to_their_mean() -> None:
    norm, proj = weights()
    first, second = streams(2)
    assert torch.equal(attention_residual_mix([first, first], first, norm, proj, EPS), first)
    mean = round_to_bf16((first.double() + second.double()) / 2)
    assert torch.equal(attention_residual_mix([first], second, norm, torch.zeros_like(proj), EPS), mean)


def test_tokens_are_mixed_alone() -> None:
    norm, proj = weights()
    *blocks, prefix = streams(4)
    whole = attention_residual_mix(blocks, prefix, norm, proj, EPS)
    for t in range(5):
        row = slice(t, t + 1)
        one = attention_residual_mix([b[row] for b in blocks], prefix[row], norm, proj, EPS)
        assert torch.equal(one, whole[row])
    none = slice(0, 0)
    assert attention_residual_mix([b[none] for b in blocks], prefix[none], norm, proj, EPS).shape == (0, 24)


def test_torch_adds_bf16_with_one_rounding() -> None:
    """The kernels leave residual additions to torch: every pair of significands at every distance must be right."""
    first = torch.arange(128, 256, dtype=torch.float64).view(-1, 1, 1)
    second = torch.arange(128, 256, dtype=torch.float64).view(1, -1, 1) * torch.exp2(-torch.arange(30.0))
    for sign in (1, -1):
        exact = first + sign * second
        added = first.to(torch.bfloat16) + (sign * second).to(torch.bfloat16)
        assert torch.equal(added, round_to_bf16(exact))
