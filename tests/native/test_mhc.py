"""Hyper-connections against a plain computation, copy by copy in numpy."""

import numpy as np
import pytest
import torch

from workloads.kernels.mhc import (
    Mix,
    MixLimits,
    MixParameters,
    broadcast_fn,
    mhc_collapse,
    mhc_expand,
    mhc_head,
    mhc_mix,
    mhc_mix_broadcast,
    sinkhorn,
)

COPIES, HIDDEN, TOKENS = 4, 96, 5
MIXES = (2 + COPIES) * COPIES
LIMITS = MixLimits(rms_eps=1e-6, eps=1e-6, iterations=20)


def parameters(rows: int = MIXES, scales: int = 3, seed: int = 0) -> MixParameters:
    generator = torch.Generator().manual_seed(seed)
    return MixParameters(
        torch.randn(rows, COPIES * HIDDEN, generator=generator) * 0.1,
        torch.rand(scales, generator=generator) + 0.5,
        torch.randn(rows, generator=generator) * 0.5,
    )


def stream(tokens: int = TOKENS, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, COPIES, HIDDEN, generator=generator).to(torch.bfloat16)


def expected_mix(x: torch.Tensor, p: MixParameters) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """pre, post, comb of every token."""
    found = []
    fn, (s0, s1, s2), base = p.fn.double().numpy(), p.scale.tolist(), p.base.double().numpy()
    for token in x.double().numpy():
        flat = token.reshape(-1)
        m = fn @ flat / np.sqrt(np.mean(flat**2) + 1e-6)
        pre = 1 / (1 + np.exp(-(m[:COPIES] * s0 + base[:COPIES]))) + 1e-6
        post = 2 / (1 + np.exp(-(m[COPIES : 2 * COPIES] * s1 + base[COPIES : 2 * COPIES])))
        comb = (m[2 * COPIES :] * s2 + base[2 * COPIES :]).reshape(COPIES, COPIES)
        comb = np.exp(comb) / np.exp(comb).sum(axis=1, keepdims=True) + 1e-6
        comb /= comb.sum(axis=0, keepdims=True) + 1e-6
        for _ in range(19):
            comb /= comb.sum(axis=1, keepdims=True) + 1e-6
            comb /= comb.sum(axis=0, keepdims=True) + 1e-6
        found.append((pre, post, comb))
    return found


def bf16(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(torch.bfloat16)


def test_mix_equals_the_formula_token_by_token() -> None:
    x, p = stream(), parameters()
    mix = mhc_mix(x, p, LIMITS)
    for i, expected in enumerate(expected_mix(x, p)):
        for got, wanted in zip(mix, expected, strict=True):
            np.testing.assert_allclose(got[i].numpy(), wanted, rtol=1e-12)


def test_collapse_and_expand_equal_sums_over_copies() -> None:
    x, p = stream(), parameters()
    out = stream(seed=3)[:, 0].contiguous()
    mix = mhc_mix(x, p, LIMITS)
    collapsed, expanded = mhc_collapse(x, mix.pre), mhc_expand(x, out, mix)
    for t, (pre, post, comb) in enumerate(expected_mix(x, p)):
        copies, added = x[t].double().numpy(), out[t].double().numpy()
        read = sum(pre[j] * copies[j] for j in range(COPIES))
        torch.testing.assert_close(collapsed[t], bf16(read), rtol=0, atol=0)
        for k in range(COPIES):
            kept = sum(comb[j, k] * copies[j] for j in range(COPIES))
            torch.testing.assert_close(expanded[t, k], bf16(post[k] * added + kept), rtol=0, atol=0)


def test_head_equals_the_formula() -> None:
    x, p = stream(), parameters(COPIES, 1)
    got = mhc_head(x, p, LIMITS)
    fn, base = p.fn.double().numpy(), p.base.double().numpy()
    for t, token in enumerate(x.double().numpy()):
        m = fn @ token.reshape(-1) / np.sqrt(np.mean(token**2) + 1e-6)
        weights = 1 / (1 + np.exp(-(m * p.scale.item() + base))) + 1e-6
        torch.testing.assert_close(got[t], bf16((weights[:, None] * token).sum(axis=0)), rtol=0, atol=0)


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    logits = torch.randn(50, COPIES, COPIES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    comb = sinkhorn(logits, 1e-6, 20)
    assert (comb.sum(dim=-2) - 1).abs().max() < 1.1e-6
    assert (comb.sum(dim=-1) - 1).abs().max() < 1e-5
    assert not torch.allclose(sinkhorn(logits, 1e-6, 1), comb, rtol=1e-2)


def test_the_shortcut_of_equal_copies_equals_the_full_form_in_float32() -> None:
    p = parameters()
    x = stream()[:, 0].contiguous()
    broadcast = broadcast_fn(p.fn, COPIES)
    assert broadcast.dtype == torch.float32
    assert broadcast.shape == (MIXES, HIDDEN)
    assert broadcast.data_ptr() != p.fn.data_ptr()
    full = mhc_mix(x.unsqueeze(1).expand(-1, COPIES, -1), p, LIMITS)
    short = mhc_mix_broadcast(x, broadcast, p, LIMITS, COPIES)
    for got, wanted in zip(short, full, strict=True):
        torch.testing.assert_close(got, wanted, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("tokens", [1, 255, 600])
def test_a_token_does_not_depend_on_the_others(tokens: int) -> None:
    x, p = stream(tokens), parameters()
    out = stream(tokens, seed=3)[:, 0].contiguous()

    def sublayer(rows: slice) -> torch.Tensor:
        mix = mhc_mix(x[rows], p, LIMITS)
        return torch.cat(
            [mhc_collapse(x[rows], mix.pre)[:, None], mhc_expand(x[rows], out[rows], mix)], dim=1
        )

    whole = sublayer(slice(None))
    for t in (0, tokens // 2, tokens - 1):
        assert torch.equal(sublayer(slice(t, t + 1))[0], whole[t])


def test_no_tokens_give_no_rows() -> None:
    x, p = stream(0), parameters()
    mix = mhc_mix(x, p, LIMITS)
    assert isinstance(mix, Mix)
    assert mhc_collapse(x, mix.pre).shape == (0, HIDDEN)
    assert mhc_expand(x, x[:, 0], mix).shape == (0, COPIES, HIDDEN)
