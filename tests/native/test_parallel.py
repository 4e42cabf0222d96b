"""Groups of ranks, and collectives whose results do not depend on how a backend adds."""

from typing import Any

import pytest
import torch
from forked_ranks import RanksRunner

from workloads.kernels import moe_dispatch
from workloads.kernels.moe_dispatch import combine, dispatch
from workloads.kernels.quantization import dequantize_fp8_rows, quantize_fp8_rows
from workloads.models.parallel import (
    ALONE,
    Group,
    all_agree,
    all_gather_columns,
    all_gather_rows,
    gather_objects,
    gather_selected,
    largest,
    make_groups,
    reduce_scatter_rows,
    scatter_selected,
)
from workloads.spec import Parallelism

TINY = 2.0**-53  # half a unit in the last place of 1


def test_share_divides_or_says_what_does_not() -> None:
    assert Group(1, 4).share(8, "heads") == (2, 2)
    with pytest.raises(ValueError, match="heads is 6, which 4 ranks cannot share equally"):
        Group(1, 4).share(6, "heads")


def test_one_rank_needs_no_process_group() -> None:
    groups = make_groups(Parallelism(), 0)
    assert (groups.world, groups.tp, groups.ep) == (ALONE, ALONE, ALONE)
    rows = torch.randn(3, 2)
    for result in (
        all_gather_rows(ALONE, rows),
        reduce_scatter_rows(ALONE, rows),
        all_gather_columns(ALONE, rows),
    ):
        assert result is rows
    assert largest(ALONE, 7) == 7
    assert gather_objects(ALONE, "x") == ["x"]


def test_a_missing_process_group_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs a process group of 4 ranks, but 0 have joined"):
        make_groups(Parallelism(tp=2, dp=2, ep=4), 0)


def test_an_expert_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="ep is 3, which does not divide the 4 ranks"):
        make_groups(Parallelism(tp=2, dp=2, ep=3), 0)


def _collectives(rank: int) -> dict[str, Any]:
    groups = make_groups(Parallelism(tp=2, dp=2, ep=4), rank)
    tp, ep = groups.tp, groups.ep
    mine = torch.full((1, 2), float(rank))
    # Added in rank order, 1 + 2^-53 + 2^-53 + 0 is 1; from the other end it is 1 + 2^-52.
    partial = (
        torch.tensor([[1.0], [TINY], [TINY], [0.0]], dtype=torch.float64)[rank].expand(4, 1).contiguous()
    )
    owned = torch.full((4, 1), -0.0 if rank % 2 == 0 else 5.0, dtype=torch.bfloat16)
    owner = torch.tensor([0, 1, 1, 0])
    return {
        "place": (groups.dp_rank, tp.rank, tp.size, ep.rank, ep.size),
        "rows": all_gather_rows(tp, mine),
        "empty": all_gather_rows(tp, mine[:0]),
        "columns": all_gather_columns(ep, mine),
        "sum": reduce_scatter_rows(ep, partial),
        "scattered": scatter_selected(tp, owned, owner),
        "gathered": gather_selected(tp, owned, owner),
        "agree": (all_agree(groups.world, True), all_agree(groups.world, rank != 3)),
        "largest": largest(groups.world, rank * 10),
        "objects": gather_objects(groups.world, f"from {rank}"),
    }


def test_collectives_of_four_ranks(run_ranks: RanksRunner) -> None:
    results = run_ranks(4, _collectives)
    assert [r["place"] for r in results] == [
        (0, 0, 2, 0, 4),
        (0, 1, 2, 1, 4),
        (1, 0, 2, 2, 4),
        (1, 1, 2, 3, 4),
    ]
    for rank, result in enumerate(results):
        first = rank // 2 * 2
        assert result["rows"].tolist() == [[first] * 2, [first + 1] * 2]
        assert result["empty"].shape == (0, 2)
        assert result["columns"].tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
        assert result["agree"] == (True, False)
        assert result["largest"] == 30
    assert results[0]["objects"] == [f"from {rank}" for rank in range(4)]
    assert results[1]["objects"] == []


def test_sums_are_taken_in_rank_order(run_ranks: RanksRunner) -> None:
    for result in run_ranks(4, _collectives):
        assert result["sum"].tolist() == [[1.0]]
    assert (TINY + TINY) + 1.0 != 1.0  # another order would show


def test_selection_keeps_the_sign_of_zero(run_ranks: RanksRunner) -> None:
    results = run_ranks(4, _collectives)
    for result in results:
        assert result["gathered"].flatten().tolist() == [0.0, 5.0, 5.0, 0.0]
        assert result["gathered"].signbit().flatten().tolist() == [True, False, False, True]
    assert [r["scattered"].flatten().tolist() for r in results[:2]] == [[0.0, 5.0], [5.0, 0.0]]
    assert results[1]["scattered"].signbit().flatten().tolist() == [False, True]


def _dispatched(rank: int, first_rows: int) -> list[Any]:
    """What the experts of `rank` receive, and what comes back to its tokens."""
    moe_dispatch.FIRST_ROWS = first_rows
    group = make_groups(Parallelism(tp=1, dp=3, ep=3), rank).ep
    tokens = (40, 0, 60)[rank]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 32, generator=generator).to(torch.bfloat16)
    topk_idx = torch.randint(-1, 6, (tokens, 4), generator=generator)
    topk_weights = torch.rand(tokens, 4, generator=generator)
    rows = dispatch(*quantize_fp8_rows(x), topk_idx, topk_weights, 6, group.handle)
    outputs = (dequantize_fp8_rows(rows.x, rows.x_scale) * rows.topk_weight.unsqueeze(1)).to(torch.bfloat16)
    received = [rows.x.view(torch.uint8), rows.x_scale, rows.topk_weight, torch.tensor(rows.counts)]
    return [*received, combine(outputs, rows.routes)]


def test_rows_arrive_alike_with_the_counts_and_after_them(run_ranks: RanksRunner) -> None:
    few, some, all_of_them = (run_ranks(3, lambda rank, n=n: _dispatched(rank, n)) for n in (8, 16, 128))
    assert min(len(rows[0]) for rows in few) > 3 * 16
    for one, two, three in zip(few, some, all_of_them, strict=True):
        for a, b, c in zip(one, two, three, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(b, c)
