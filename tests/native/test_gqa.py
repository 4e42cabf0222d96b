"""Rotation, grouped-query attention and softmax routing against their formulas, written out in float64."""

import math

import pytest
import torch

from workloads.kernels.gqa import gqa_attention
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.rope import rope_table, rotate_half_split
from workloads.kernels.routing import route_softmax

torch.set_num_threads(1)


def test_rope_turns_channel_i_with_channel_i_plus_half() -> None:
    torch.manual_seed(0)
    theta, dim = 1e6, 8
    x = torch.randn(5, 2, dim).to(torch.bfloat16)
    positions = torch.tensor([0, 1, 7, 1000, 39999])
    table = rope_table(40960, dim, theta)
    assert (table.shape, table.dtype) == ((40960, dim), torch.float32)
    got = rotate_half_split(x, table[positions])
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            for i in range(dim // 2):
                angle = position * theta ** (-2 * i / dim)
                turn = complex(math.cos(angle), math.sin(angle))
                turned = complex(x[t, head, i].item(), x[t, head, i + dim // 2].item()) * turn
                assert got[t, head, i].item() == pytest.approx(turned.real, rel=1 / 256, abs=1e-6)
                assert got[t, head, i + dim // 2].item() == pytest.approx(turned.imag, rel=1 / 256, abs=1e-6)
    assert torch.equal(got[0], x[0])


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 64).to(torch.bfloat16)
    table = rope_table(100, 64, 1e6)

    def score(i: int, j: int) -> float:
        turned = [rotate_half_split(x, table[p : p + 1]).double().flatten() for x, p in ((q, i), (k, j))]
        return torch.dot(*turned).item()

    assert score(20, 11) == pytest.approx(score(99, 90), abs=0.3)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            of, seen = h * k.shape[1] // heads, start + t + 1
            scores = [torch.dot(q[t, h].double(), k[s, of].double()) / math.sqrt(width) for s in range(seen)]
            powers = torch.stack(scores).exp()
            out[t, h] = (powers / powers.sum()) @ v[:seen, of].double()
    return round_to_bf16(out)


@pytest.mark.parametrize(("start", "tokens"), [(0, 9), (5, 3), (8, 1)])
def test_attention_matches_the_formula(start: int, tokens: int) -> None:
    torch.manual_seed(start)
    q = torch.randn(tokens, 6, 16).to(torch.bfloat16)
    k, v = torch.randn(2, 12, 2, 16).to(torch.bfloat16)
    assert torch.equal(gqa_attention(q, k, v, start), reference(q, k, v, start))


def test_a_token_alone_attends_as_in_its_prompt() -> None:
    q = torch.randn(300, 4, 32).to(torch.bfloat16)
    k, v = torch.randn(2, 300, 2, 32).to(torch.bfloat16)
    whole = gqa_attention(q, k, v, 0)
    for t in (0, 1, 255, 256, 299):
        assert torch.equal(gqa_attention(q[t : t + 1], k, v, t), whole[t : t + 1])


def test_missing_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="end at position 5 and the cache holds 4 positions"):
        gqa_attention(torch.zeros(2, 1, 4).bfloat16(), *torch.zeros(2, 4, 1, 4).bfloat16(), 3)


def test_softmax_routing_matches_the_formula() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 16, dtype=torch.float64)
    topk_idx, weights = route_softmax(logits, 3)
    for row, idx, got in zip(logits.tolist(), topk_idx.tolist(), weights.tolist(), strict=True):
        total = sum(map(math.exp, row))
        probabilities = [math.exp(value) / total for value in row]
        expected = sorted(range(16), key=lambda e: -probabilities[e])[:3]
        assert idx == expected
        chosen = sum(probabilities[e] for e in expected)
        assert got == pytest.approx([probabilities[e] / chosen for e in expected], rel=1e-7)
    assert weights.sum(dim=1).tolist() == pytest.approx([1] * 7)


def test_equal_probabilities_go_to_the_lower_expert() -> None:
    assert route_softmax(torch.zeros(1, 5), 3)[0].tolist() == [[0, 1, 2]]


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k is 5, but a token can choose between 1 and 4"):
        route_softmax(torch.zeros(1, 4), 5)
