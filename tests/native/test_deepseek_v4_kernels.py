"""Rotation, FP8 blocks, routing and compressed attention of DeepSeek-V4 against plain computations."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from workloads.kernels.compressed_attention import (
    best_entries,
    hadamard,
    index_scores,
    overlapping,
    pool,
    sink_attention,
    through_fp4,
)
from workloads.kernels.fp8_blocks import (
    expand_scales,
    fp8_linear_partial,
    pack_scales,
    quantize_fp8_blocks,
    through_fp8,
    unpack_scales,
)
from workloads.kernels.interleaved_rope import Yarn, cos_sin_table, deepseek_frequencies, rotate, rotated
from workloads.kernels.quantization import decode_e8m0, dequantize_fp8_tiles
from workloads.kernels.routing import route_hashed, route_sqrtsoftplus_noaux
from workloads.loading.streams import index_tensor

PUBLISHED = Yarn(factor=16.0, original=65536, beta_fast=32.0, beta_slow=1.0)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Rotation ------------------------------------------------------------------------------------------


def test_rotation_turns_neighbouring_channels_and_its_inverse_turns_back() -> None:
    x = noise(3, 2, 10).to(torch.bfloat16)
    table = cos_sin_table(50, deepseek_frequencies(6, 1e4))
    positions = [0, 7, 49]
    got = rotated(x, table[positions])
    for t, position in enumerate(positions):
        for head in range(2):
            assert got[t, head, :4].tolist() == x[t, head, :4].tolist()
            for pair in range(3):
                angle = position * 1e4 ** (-2 * pair / 6)
                a, b = x[t, head, 4 + 2 * pair].item(), x[t, head, 5 + 2 * pair].item()
                turned = complex(a, b) * complex(math.cos(angle), math.sin(angle))
                assert got[t, head, 4 + 2 * pair].item() == pytest.approx(turned.real, abs=1e-6)
                assert got[t, head, 5 + 2 * pair].item() == pytest.approx(turned.imag, abs=1e-6)
    torch.testing.assert_close(rotated(got, table[positions], inverse=True), x.double(), rtol=1e-6, atol=1e-6)
    assert rotate(x, table[positions]).dtype == torch.bfloat16


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain, stretched = (deepseek_frequencies(64, 1.6e5, yarn) for yarn in (None, PUBLISHED))
    expected = []
    for i, f in enumerate(plain.tolist()):
        bounds = [64 * math.log(65536 / (b * 2 * math.pi)) / (2 * math.log(1.6e5)) for b in (32, 1)]
        low, high = math.floor(bounds[0]), math.ceil(bounds[1])
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(f / 16 * ramp + f * (1 - ramp))
    torch.testing.assert_close(stretched, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert stretched[0] == plain[0]
    assert stretched[-1] == plain[-1] / 16


# FP8 in blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (160, 200), (64, 128), (5, 300)])
def test_fp8_blocks_equal_a_loop_over_the_blocks(rows: int, columns: int) -> None:
    w = noise(rows, columns) * torch.exp2(noise(rows, 1, seed=1).mul(3).round())
    q, scales = quantize_fp8_blocks(w)
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = w[part]
            exponent = math.ceil(math.log2(block.abs().max().item() / 448))
            assert scales[i, j].item() == exponent + 127
            assert torch.equal(q[part].float(), (block / 2.0**exponent).to(torch.float8_e4m3fn).float())
    decoded = dequantize_fp8_tiles(q, decode_e8m0(scales))
    assert (decoded - w.double()).abs().max() <= w.abs().max() * 2**-4
    assert torch.equal(decoded, q.double() * decode_e8m0(expand_scales(scales, rows, columns, 128, 1)))


def test_expanded_scales_repeat_every_block_for_its_rows_and_groups() -> None:
    scales = torch.arange(6, dtype=torch.uint8).view(2, 3)
    expanded = expand_scales(scales, 200, 300, 128, 32)
    assert expanded.shape == (200, 10)
    for r in (0, 127, 128, 199):
        for c in (0, 3, 4, 8, 9):
            assert expanded[r, c] == scales[r // 128, 32 * c // 128]


@pytest.mark.parametrize(("rows", "columns"), [(12, 8), (7, 3)])
def test_packed_scales_are_mn_major_words_with_the_first_column_lowest(rows: int, columns: int) -> None:
    by_row = torch.randint(1, 255, (rows, columns), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    packed = pack_scales(by_row)
    assert packed.shape == (rows, -(-columns // 4))
    assert packed.stride() == (1, -(-rows // 4) * 4)
    for r in range(rows):
        for word in range(packed.shape[1]):
            value = sum(by_row[r, 4 * word + j].item() << 8 * j for j in range(4) if 4 * word + j < columns)
            assert packed[r, word].item() & 0xFFFFFFFF == value
    assert torch.equal(unpack_scales(packed, columns), by_row)


def test_fp8_product_equals_the_sum_of_decoded_values() -> None:
    w, x = noise(192, 200), noise(9, 200, seed=1).to(torch.bfloat16)
    q, scales = quantize_fp8_blocks(w)
    packed = pack_scales(expand_scales(scales, 192, 200, 128, 128))
    activations = torch.zeros(9, 200, dtype=torch.float64)
    for t in range(9):
        for start in (0, 128):
            part = x[t, start : start + 128].float()
            scale = 2.0 ** math.ceil(math.log2(max(part.abs().max().item(), 1e-4) / 448))
            activations[t, start : start + 128] = (part / scale).to(torch.float8_e4m3fn).double() * scale
    assert torch.equal(through_fp8(x, 128), activations)
    expected = activations @ dequantize_fp8_tiles(q, decode_e8m0(scales)).t()
    torch.testing.assert_close(fp8_linear_partial(x, q, packed), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="post-process the weights before the first forward"):
        fp8_linear_partial(x, q, scales)


# Routing -------------------------------------------------------------------------------------------


def test_sqrtsoftplus_routing_equals_the_formula() -> None:
    logits, bias = noise(6, 16) * 3, noise(16, seed=1) * 0.3
    topk_idx, weights = route_sqrtsoftplus_noaux(logits, bias, 4, 1.5)
    for t in range(6):
        scores = [math.sqrt(math.log(1 + math.exp(x))) for x in logits[t].tolist()]
        ranked = sorted(range(16), key=lambda e: -(scores[e] + bias[e].item()))[:4]
        assert topk_idx[t].tolist() == ranked
        total = sum(scores[e] for e in ranked)
        assert weights[t].tolist() == pytest.approx([scores[e] / total * 1.5 for e in ranked], rel=1e-6)
    _, hashed = route_hashed(logits, topk_idx, 1.5)
    assert torch.equal(hashed, weights)


def test_routing_survives_logits_of_any_size() -> None:
    _, weights = route_hashed(torch.tensor([[-1e4, 1e4]]), torch.tensor([[0, 1]]), 1.0)
    assert weights.tolist() == [[0.0, 1.0]]


# Compressed attention ------------------------------------------------------------------------------


def test_pooling_weighs_tokens_channel_by_channel() -> None:
    kv, scores = noise(3, 4, 5), noise(3, 4, 5, seed=1)
    scores[0, :2] = -torch.inf
    weights = np.exp(scores.double().numpy())
    expected = (weights / weights.sum(axis=1, keepdims=True) * kv.double().numpy()).sum(axis=1)
    np.testing.assert_allclose(pool(kv, scores).numpy(), expected, rtol=1e-12)


def test_overlapping_groups_take_half_the_channels_of_the_group_before() -> None:
    groups = noise(3, 2, 6)
    candidates = overlapping(groups)
    assert candidates.shape == (2, 4, 3)
    for g in range(2):
        assert torch.equal(candidates[g, :2], groups[g, :, :3])
        assert torch.equal(candidates[g, 2:], groups[g + 1, :, 3:])


def test_hadamard_is_sylvesters_matrix() -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = noise(3, 16)
    torch.testing.assert_close(hadamard(x), x.double() @ matrix.t() / 4, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="power of two of channels, not 12"):
        hadamard(noise(1, 12))


def test_fp4_keeps_a_block_within_its_step() -> None:
    x = noise(5, 64)
    rotated_x, decoded = hadamard(x), through_fp4(x)
    amax = rotated_x.unflatten(-1, (2, 32)).abs().amax(dim=-1)
    step = 2.0 ** torch.ceil(torch.log2(amax / 6))
    error = (decoded.double() - rotated_x).unflatten(-1, (2, 32)).abs().amax(dim=-1)
    assert (error <= step * 1.02).all()
    assert len(decoded[0, :32].double().div(step[0, 0]).abs().unique()) <= 8
    assert through_fp4(noise(5, 16)).shape == (5, 16)


def test_index_scores_and_choice() -> None:
    queries, keys = through_fp4(noise(4, 3, 32)), through_fp4(noise(7, 32, seed=1))
    weights = noise(4, 3, seed=2).to(torch.bfloat16)
    scores = index_scores(queries, keys, weights)
    for t in range(4):
        for e in range(7):
            each = [max(0.0, float(queries[t, h].double() @ keys[e].double())) for h in range(3)]
            expected = sum(w * s for w, s in zip(weights[t].tolist(), each, strict=True))
            assert scores[t, e].item() == pytest.approx(expected, abs=1e-12)
    visible = torch.arange(7) < torch.tensor([[0], [2], [5], [7]])
    chosen = best_entries(scores, visible, 3)
    for t, count in enumerate((0, 2, 5, 7)):
        ranked = sorted(range(count), key=lambda e, t=t: -scores[t, e].item())[:3]
        assert chosen[t].nonzero().flatten().tolist() == sorted(ranked)
    assert torch.equal(best_entries(scores, visible, 7), visible)
    equal = best_entries(torch.zeros(1, 7, dtype=torch.float64), visible[3:], 2)
    assert equal.nonzero().tolist() == [[0, 0], [0, 1]]


def test_attention_with_a_sink_equals_the_formula() -> None:
    q, keys = noise(3, 2, 8).to(torch.bfloat16), noise(5, 8, seed=1).to(torch.bfloat16)
    seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [0, 1, 1, 1, 1]]).bool()
    sinks = torch.tensor([0.5, -30.0])
    got = sink_attention(q, keys, seen, sinks)
    for t in range(3):
        for head in range(2):
            dots = keys.double().numpy() @ q[t, head].double().numpy() * 8**-0.5
            powers = np.exp(dots) * seen[t].numpy()
            expected = powers @ keys.double().numpy() / (powers.sum() + math.exp(sinks[head]))
            np.testing.assert_allclose(got[t, head].numpy(), expected, rtol=1e-12)


# A table of experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("below", "columns"), [(384, 6), (256, 6), (8, 8), (7, 3)])
def test_generated_rows_of_a_table_hold_different_indices(below: int, columns: int) -> None:
    table = index_tensor("layers.0.ffn.gate.tid2eid", (1000, columns), below, seed=0)
    assert table.dtype == torch.int64
    assert (table.sort(dim=1).values.diff(dim=1) > 0).all()
    assert table.unique().tolist() == list(range(below))
    assert not torch.equal(table, index_tensor("layers.1.ffn.gate.tid2eid", (1000, columns), below, seed=0))
    assert torch.equal(table, index_tensor("layers.0.ffn.gate.tid2eid", (1000, columns), below, seed=0))
