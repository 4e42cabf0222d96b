"""Derived tensors are built again from the weights beside them; bytes are compared as a multiset and by rows."""

from collections.abc import Mapping

import pytest
import torch

from collectors.byte_order import counts_of_bytes, flat_bytes, rows_too_early
from collectors.derived import follows
from collectors.fingerprint import fingerprint
from collectors.parts import is_decay_of
from workloads.loading.weights import Placement, Weight, WeightModule, whole


class Doubled(WeightModule):
    """`weight` BF16 [4]; derived `twice` BF16 [4]."""

    twice: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_weight("weight", Weight((4,), torch.bfloat16, (Placement("w", *3 * (whole((4,)),)),)))
        self.get_parameter("weight").copy_(torch.arange(4))

    def derivations(self) -> Mapping[str, torch.Tensor]:
        return {"twice": self.get_parameter("weight").detach() * 2}


@pytest.fixture
def module() -> Doubled:
    module = Doubled()
    module.post_process()
    return module


def test_what_post_processing_builds_follows_from_the_weights(module: Doubled) -> None:
    assert module.twice.tolist() == [0, 2, 4, 6]
    assert follows({"target": module}) == {"target:twice": {"follows": fingerprint(module.twice)}}


@pytest.mark.parametrize(("value", "deviation"), [(3.0, 1.0), (float("nan"), None)])
def test_what_does_not_says_how_far_it_is(module: Doubled, value: float, deviation: float | None) -> None:
    expected = fingerprint(module.twice)
    module.twice[1] = value
    assert follows({"target": module}) == {"target:twice": {"follows": expected, "deviation": deviation}}


def test_what_has_never_been_built_is_not_said_to_follow() -> None:
    assert follows({"target": Doubled()}) == {}


def test_rows_that_come_too_early_are_counted() -> None:
    wanted = torch.arange(2 * 6 * 8, dtype=torch.uint8).reshape(2, 6, 8)
    live = torch.zeros_like(wanted)
    live[:, :4] = wanted[:, 2:]
    assert rows_too_early(flat_bytes(live), flat_bytes(wanted), wanted.shape) == 2
    assert rows_too_early(flat_bytes(live[0]), flat_bytes(wanted[0]), wanted[0].shape) == 2
    assert rows_too_early(flat_bytes(live[:1]), flat_bytes(wanted[:1]), wanted[:1].shape) == 2
    assert (
        rows_too_early(flat_bytes(live[0, 0]), flat_bytes(wanted[0, 0]), torch.Size()) == 0
    )  # a scalar has no rows
    live[1, 3] = 0
    assert rows_too_early(flat_bytes(live), flat_bytes(wanted), wanted.shape) == 0
    assert rows_too_early(flat_bytes(wanted), flat_bytes(wanted), wanted.shape) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decay_that_was_applied_already_is_told_from_any_other_vector(dtype: torch.dtype) -> None:
    logarithms = torch.linspace(-0.7, 0.7, 8, dtype=torch.float64).to(dtype)
    applied = -logarithms.to(torch.float64).exp()
    assert is_decay_of(applied.to(dtype), logarithms)
    assert not is_decay_of(logarithms, logarithms)
    assert not is_decay_of((-(-applied).exp()).to(dtype), logarithms)  # of a decay as it serves
    assert not is_decay_of(applied.to(dtype)[:4], logarithms)
    assert not is_decay_of(applied, logarithms.to(torch.float64))  # no parameter has that type


def test_a_multiset_of_bytes_does_not_see_their_order() -> None:
    values = torch.randn(32).to(torch.bfloat16)
    counts = counts_of_bytes(flat_bytes(values))
    assert counts.sum() == values.nbytes
    assert torch.equal(counts, counts_of_bytes(flat_bytes(values.flip(0))))
