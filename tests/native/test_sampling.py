"""Token choice: ties, counters instead of generators, the distribution itself, and log-probabilities."""

import math

import pytest
import torch

from workloads.kernels import sampling as sampling_module
from workloads.kernels.sampling import greedy, sample, top_logprobs, uniform

torch.set_num_threads(1)

VOCAB = 50


def random_logits(batch: int) -> torch.Tensor:
    """BF16-valued logits, as an lm_head gives them: many exact ties."""
    values = torch.randn(batch, VOCAB, generator=torch.Generator().manual_seed(0))
    return (4 * values).to(torch.bfloat16).to(torch.float32)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-4.0, -1.0, -2.0, -1.0]])
    assert greedy(logits).tolist() == [1, 0, 1]
    assert greedy(logits.to(torch.float64)).tolist() == [1, 0, 1]
    assert greedy(logits.repeat(1, 500)).tolist() == [1, 0, 1]  # long rows take another path through torch
    assert sample(logits, 0.0, 7, ["a", "b", "c"], [0, 0, 0]).tolist() == [1, 0, 1]
    assert greedy(torch.empty(0, 4)).shape == (0,)


def test_uniform_is_a_function_of_every_argument() -> None:
    assert uniform(1, "question-17", 3) == uniform(1, "question-17", 3)
    keys = [(seed, name, t) for seed in range(5) for name in ("a", "b", "a/1", "1/a") for t in range(50)]
    draws = [uniform(*key) for key in keys]
    assert len(set(draws)) == len(draws)
    assert all(0 <= u < 1 for u in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03
    assert uniform(1, "2/x", 3) != uniform(1, "x", 32)


def test_uniform_keeps_its_values_between_versions() -> None:
    """Recorded generations can only be compared with new ones while these stay."""
    assert uniform(0, "request", 0) == 0.6952595034118917
    assert uniform(1, "request", 2) == 0.8618171554284505


def test_sample_does_not_depend_on_batch_or_order() -> None:
    logits, ids, positions = random_logits(8), [f"r{i}" for i in range(8)], list(range(8))
    whole = sample(logits, 0.8, 3, ids, positions).tolist()
    alone = [int(sample(logits[i : i + 1], 0.8, 3, ids[i : i + 1], [i])) for i in range(8)]
    backwards = sample(logits.flip(0), 0.8, 3, ids[::-1], positions[::-1]).tolist()
    assert whole == alone == backwards[::-1]
    assert whole != sample(logits, 0.8, 4, ids, positions).tolist()
    assert whole != sample(logits, 0.8, 3, ids, [p + 1 for p in positions]).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sample_follows_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor([[2.0, -math.inf, 0.5, 1.0, -1.0]])
    draws = 8000
    chosen = sample(logits.expand(draws, -1), temperature, 11, ["x"] * draws, range(draws))
    counts = chosen.bincount(minlength=5).tolist()
    weights = [math.exp(x / temperature) for x in logits[0].tolist()]
    expected = [draws * w / sum(weights) for w in weights]
    assert counts[1] == 0
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)
    assert chi_square < 16.27  # 99.9 % point with 3 degrees of freedom; the draws are fixed


def test_sample_never_takes_an_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of [0, 1) the draw meets the edge of a token of probability zero."""
    logits = torch.tensor([[-math.inf, 0.0, 0.3, -math.inf]])
    for u, expected in ((0.0, 1), (1 - 2.0**-53, 2)):
        monkeypatch.setattr(sampling_module, "uniform", lambda *_, u=u: u)
        assert sample(logits, 1.0, 0, ["a"], [0]).tolist() == [expected]


def test_sample_refuses_a_negative_temperature() -> None:
    with pytest.raises(ValueError, match=r"temperature is -0\.5"):
        sample(random_logits(1), -0.5, 0, ["a"], [0])


def test_sample_of_broken_logits_is_greedy_and_a_valid_id() -> None:
    logits = torch.tensor([[1.0, math.nan, 2.0], [1.0, 0.0, math.inf], [math.nan, math.nan, math.nan]])
    assert sample(logits, 1.0, 0, ["a", "b", "c"], [0, 0, 0]).tolist() == greedy(logits).tolist() == [1, 2, 0]


def test_top_logprobs_equal_naive_sorted_with_ties_by_id() -> None:
    logits = random_logits(6)
    ids, logprobs = top_logprobs(logits, 20)
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    for row, row_ids, row_logprobs in zip(logits.tolist(), ids.tolist(), logprobs.tolist(), strict=True):
        order = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:20]
        normaliser = max(row) + math.log(math.fsum(math.exp(x - max(row)) for x in row))
        expected = torch.tensor([row[i] - normaliser for i in order], dtype=torch.float64)
        assert row_ids == order
        assert torch.allclose(torch.tensor(row_logprobs), expected.float(), rtol=2e-7, atol=0)
    assert any(len(set(row)) < 20 for row in logprobs.tolist())  # ties were there
    assert torch.equal(ids[:, 0], greedy(logits))


def test_top_logprobs_do_not_depend_on_batch_dtype_or_shift() -> None:
    logits = random_logits(6)
    ids, logprobs = top_logprobs(logits, 5)
    wide_ids, wide_logprobs = top_logprobs(logits.to(torch.float64) + 1024, 5)
    assert torch.equal(wide_ids, ids)
    assert torch.equal(wide_logprobs, logprobs)
    for i in range(6):
        one_ids, one_logprobs = top_logprobs(logits[i : i + 1], 5)
        assert torch.equal(one_ids[0], ids[i])
        assert torch.equal(one_logprobs[0], logprobs[i])
    assert top_logprobs(logits[:0], 5)[0].shape == (0, 5)


def test_logprob_of_a_near_certain_token_keeps_its_digits() -> None:
    """log softmax by subtraction would give 0 here, or noise that differs between batch shapes."""
    _, logprobs = top_logprobs(torch.tensor([[0.0, 40.0, 1.0]]), 3)
    expected = -math.log1p(math.exp(-39) + math.exp(-40))
    assert logprobs[0, 0].item() == pytest.approx(expected, rel=1e-7, abs=0)
    assert logprobs[0, 1:].tolist() == [-39, -40]
