"""Formulas of DeepSeek-V4.1 against plain computations."""

import math

import pytest
import torch
from torch import Tensor

from workloads.kernels.compressed_attention import candidate_entries, through_nvfp4
from workloads.kernels.engram import (
    add_gated,
    compressed_ids,
    engram_gates,
    hash_multipliers,
    last_tokens,
    ngram_rows,
)
from workloads.kernels.fused_attention_layout import deinterleave, interleave
from workloads.loading.quantized import FORMATS


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_texts_that_differ_in_case_accents_and_blanks_are_one() -> None:
    texts = ["A", "a", "\u00e0", "\uff41", "ab", " \t", "\n", "\u00a0", "<200>", "\u00df"]
    assert compressed_ids(texts) == [0, 0, 0, 0, 1, 2, 2, 2, 3, 4]


def test_multipliers_are_odd_differ_by_layer_and_never_overflow() -> None:
    first, other = hash_multipliers(1, 4, 99_092), hash_multipliers(14, 4, 99_092)
    assert all(number % 2 for number in first + other)
    assert len({*first, *other}) == 8
    assert max(first + other) * 99_091 < 2**63
    assert first == hash_multipliers(1, 4, 99_092)


def test_last_tokens_stop_where_the_text_began_or_broke() -> None:
    ids = torch.tensor([5, 6, -1, 7, 8, 9])
    expected = [[5, 0, 0], [6, 5, 0], [0, 0, 0], [7, 0, 0], [8, 7, 0], [9, 8, 7]]
    assert last_tokens(ids, 6, 3, 0).tolist() == expected
    assert last_tokens(ids[1:], 3, 3, 0).tolist() == expected[3:]
    assert last_tokens(ids[2:], 3, 3, 0).tolist() == expected[3:]


def test_rows_are_the_hashes_of_two_tokens_then_of_three() -> None:
    multipliers = hash_multipliers(3, 3, 1000)
    sizes, offsets = [101, 103, 107, 109], [0, 101, 204, 311]
    last = torch.tensor([[7, 999, 0], [1, 2, 3]])
    found = ngram_rows(last, *(torch.tensor(values) for values in (multipliers, sizes, offsets)))
    for (a, b, c), row in zip(last.tolist(), found.tolist(), strict=True):
        two = a * multipliers[0] ^ b * multipliers[1]
        hashes = [two, two, two ^ c * multipliers[2], two ^ c * multipliers[2]]
        assert row == [h % size + offset for h, size, offset in zip(hashes, sizes, offsets, strict=True)]


def test_gates() -> None:
    x, keys = (noise(5, 3, 32, seed=seed).to(torch.bfloat16) for seed in (1, 2))
    weights = [noise(3, 32, seed=seed).to(torch.bfloat16) for seed in (3, 4)]
    x[0, 0] = 0  # no direction at all: its gate is that of a dot of +0
    found = engram_gates(x, keys, weights, 1e-20)
    for t in range(5):
        for j in range(3):
            a, b = x[t, j].double(), keys[t, j].double()
            dot = sum(
                float(p * q * u * v)
                for p, q, u, v in zip(a, b, *(w[j].double() for w in weights), strict=True)
            )
            dot *= (float(a.square().mean()) + 1e-20) ** -0.5 * (float(b.square().mean()) + 1e-20) ** -0.5
            dot /= math.sqrt(32)
            root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
            assert float(found[t, j]) == pytest.approx(1 / (1 + math.exp(-root)), rel=1e-12)


def test_a_gated_value_is_added_to_each_copy() -> None:
    x, value = noise(4, 2, 8).to(torch.bfloat16), noise(4, 8, seed=1).to(torch.bfloat16)
    gates = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gates[1] = 0
    found = add_gated(x, gates, value)
    assert torch.equal(found, (x.double() + gates[:, :, None] * value.double()[:, None]).to(torch.bfloat16))
    assert torch.equal(found[1], x[1])


@pytest.mark.parametrize(("heads", "chunk"), [(2, 16), (4, 32), (3, 1)])
def test_chunks_of_heads_take_turns(heads: int, chunk: int) -> None:
    channels = 4 * chunk
    x = torch.arange(2 * heads * channels).view(2, -1)
    found = interleave(x, 1, heads, chunk)
    for h in range(heads):
        for d in range(channels):
            place = (d // chunk * heads + h) * chunk + d % chunk
            assert found[0, place] == h * channels + d
    assert torch.equal(deinterleave(found, 1, heads, chunk), x)
    assert torch.equal(interleave(x.t().contiguous(), 0, heads, chunk), found.t())


def test_the_filter_keeps_the_best_blocks_and_the_newest() -> None:
    scores = noise(30, 30).double()
    scores[:, 3] = scores[:, 9] = 7.0  # equals in different blocks
    visible = torch.arange(30) <= torch.arange(30)[:, None]
    visible[0] = False
    found = candidate_entries(scores, visible, blocks=3, size=4)
    for t in range(30):
        count = int(visible[t].sum())
        best = {
            block: float(scores[t, block * 4 : min(block * 4 + 4, count)].max())
            for block in range(-(-count // 4))
        }
        if count:
            best[(count - 1) // 4] = math.inf
        kept = sorted(best, key=lambda block, best=best: (-best[block], block))[:3]
        assert found[t].nonzero().flatten().tolist() == [j for j in range(count) if j // 4 in kept]
    wide = torch.cat(
        [scores, noise(30, 9, seed=3).double()], dim=1
    )  # entries that nobody sees change nothing
    unseen = torch.cat([visible, torch.zeros(30, 9, dtype=torch.bool)], dim=1)
    assert torch.equal(candidate_entries(wide, unseen, 3, 4)[:, :30], found)
    assert candidate_entries(scores[:, :12], visible[:, :12], 3, 4).equal(visible[:, :12])


def test_compressed_keys_are_rounded_to_fp4_under_a_scale_for_16() -> None:
    x = (noise(3, 32) * torch.tensor([1e-4, 1.0, 300.0])[:, None]).to(torch.bfloat16)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    found = through_nvfp4(x)
    for row, rounded in zip(x.double().view(-1, 16), found.double().view(-1, 16), strict=True):
        wanted = max(float(row.abs().max()), 6 * 2**-9) / 6
        scale = float(torch.tensor(wanted).to(torch.float8_e4m3fn).double())
        for value, got in zip(row, rounded, strict=True):
            nearest = (
                (values - min(abs(float(value)) / scale, 6.0)).abs().argmin()
            )  # the first, so the lower, of equals
            assert float(got) == math.copysign(float(values[nearest]) * scale, float(value))
    assert torch.equal(through_nvfp4(found), found)


def test_formats_of_blocks_of_32_and_of_rows() -> None:
    matrix = noise(64, 96) * torch.linspace(0.01, 4, 96)
    for name, shape in (("fp8_e8m0_block32", (2, 3)), ("fp8_e8m0_rows32", (64, 3))):
        pieces = FORMATS[name](matrix)
        assert pieces["scale"].shape == shape
        assert pieces["scale"].dtype == torch.float8_e8m0fnu
        scales = pieces["scale"].double().repeat_interleave(64 // shape[0], 0).repeat_interleave(32, 1)
        decoded = pieces["weight"].double() * scales
        assert ((decoded - matrix.double()).abs() <= matrix.double().abs() / 16 + scales * 2**-10).all()
        assert pieces["weight"].double().abs().amax() > 200  # the scales fit: the codes reach high
