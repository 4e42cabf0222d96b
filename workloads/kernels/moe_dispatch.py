"""Expert-parallel dispatch and combine of token rows over a process group.

Rank r of the group owns the experts r*E_loc .. (r+1)*E_loc-1. Rows travel as bytes, because gloo sends neither
float8 nor (portably) bfloat16. Inside an expert, rows stand in the order (source rank, token, slot).

The first rows for each rank travel in the message that says how many there are: a decode step, which sends few, then
costs one collective instead of two.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_ROWS = 8  # for each rank, sent with the counts; a multiple of 8 keeps the headers aligned
_HEADER = 16  # bytes before them: rows for this rank, most rows for any rank


class Routes(NamedTuple):
    """Where the rows of one dispatch came from, which is where `combine` returns them."""

    group: dist.ProcessGroup | None
    tokens: int
    slots: int
    pairs: Tensor  # int64 [sent]: token * slots + slot of each sent row, in sending order
    sent: list[int]  # rows per destination rank
    received: list[int]  # rows per source rank
    arrival: Tensor  # int64 [received]: arrival index of each row that stands in expert order


class ExpertRows(NamedTuple):
    """Rows this rank's experts must compute, those of expert 0 first; `counts[e]` rows belong to expert e."""

    x: Tensor  # float8_e4m3fn [R, H]
    x_scale: Tensor  # UE8M0 uint8 [R, H/32]
    topk_weight: Tensor  # float32 [R]
    counts: list[int]
    routes: Routes


def dispatch(
    x: Tensor,
    x_scale: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
) -> ExpertRows:
    """Send every (token, slot) with topk_idx >= 0 to the rank of its expert; collective over `group`.

    x float8_e4m3fn [T, H], x_scale uint8 [T, H/32], topk_idx int64 [T, K] global ids (negative: masked),
    topk_weights float32 [T, K]. group None: all experts are here and nothing is sent.
    ValueError when num_experts is not divisible by the group, an id is out of range or a dtype is another.
    """
    _check_dtypes(x, x_scale, topk_idx, topk_weights)
    flat_idx = topk_idx.reshape(-1)
    local_experts = _local_experts(flat_idx, num_experts, group)
    pairs = torch.nonzero(flat_idx >= 0).squeeze(1)
    destination = flat_idx[pairs] // local_experts
    destination, order = torch.sort(destination, stable=True)
    pairs = pairs[order]
    tokens = pairs // topk_idx.shape[1]
    local_id = (flat_idx[pairs] % local_experts).to(torch.int32)
    columns = (x[tokens], x_scale[tokens], local_id.unsqueeze(1), topk_weights.reshape(-1, 1)[pairs])
    packed = torch.cat([column.view(torch.uint8) for column in columns], dim=1)
    arrived, sent, received = _send(packed, destination, num_experts // local_experts, group)
    expert = arrived[:, -8:-4].contiguous().view(torch.int32).squeeze(1)
    arrival = torch.argsort(expert, stable=True)
    rows = arrived[arrival]
    hidden = x.shape[1]
    return ExpertRows(
        x=rows[:, :hidden].view(torch.float8_e4m3fn),
        x_scale=rows[:, hidden:-8],
        topk_weight=rows[:, -4:].contiguous().view(torch.float32).squeeze(1),
        counts=torch.bincount(expert, minlength=local_experts).tolist(),
        routes=Routes(group, topk_idx.shape[0], topk_idx.shape[1], pairs, sent, received, arrival),
    )


def combine(rows: Tensor, routes: Routes, shared: Tensor | None = None) -> Tensor:
    """Return the expert outputs bf16 [R, H] to their tokens and sum them: bf16 [T, H]; collective over the group.

    y = bf16(plain float32 sum over the valid slots, in slot order), as the kernel reduces its combine buffer.
    shared: bf16 [T, H], the last slot of every token, which has not travelled.
    """
    arrived = torch.empty_like(rows)
    arrived[routes.arrival] = rows
    returned = _exchange_rows(arrived.view(torch.uint8), routes.received, routes.sent, routes.group)
    slots = rows.new_zeros((routes.tokens * routes.slots, rows.shape[1]))  # masked slots add zero
    slots[routes.pairs] = returned.view(torch.bfloat16)
    slots = slots.view(routes.tokens, routes.slots, rows.shape[1])
    total = torch.zeros((routes.tokens, rows.shape[1]), dtype=torch.float32, device=rows.device)
    for slot in range(routes.slots):
        total += slots[:, slot]
    if shared is not None:
        total += shared
    return total.to(torch.bfloat16)


def _check_dtypes(x: Tensor, x_scale: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    """ValueError for a dtype whose bytes the receiver would misread."""
    expected = {
        "x": (x, torch.float8_e4m3fn),
        "x_scale": (x_scale, torch.uint8),
        "topk_idx": (topk_idx, torch.int64),
        "topk_weights": (topk_weights, torch.float32),
    }
    for name, (tensor, dtype) in expected.items():
        if tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}, but MegaMoE takes {dtype}: convert it before the dispatch."
            )


def _local_experts(flat_idx: Tensor, num_experts: int, group: dist.ProcessGroup | None) -> int:
    """Experts per rank; ValueError for an unequal share or an id that no rank owns."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if num_experts % ranks:
        raise ValueError(
            f"num_experts is {num_experts}, which {ranks} expert-parallel ranks cannot share equally: "
            "choose an ep that divides it."
        )
    if flat_idx.numel() and int(flat_idx.max()) >= num_experts:
        raise ValueError(
            f"topk_idx holds expert {int(flat_idx.max())}, but num_experts is {num_experts}: "
            "ids run from 0 to num_experts - 1, and -1 masks a slot."
        )
    return num_experts // ranks


def _send(
    rows: Tensor, destination: Tensor, ranks: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, list[int], list[int]]:
    """Byte rows uint8 [R, bytes] with their ascending destinations int64 [R] -> uint8 rows by source, and how many
    rows went to and came from each rank."""
    counts = torch.bincount(destination, minlength=ranks)
    sent = counts.tolist()
    if group is None:
        return rows, sent, sent
    position = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[destination]
    first = position < FIRST_ROWS
    message = rows.new_zeros((ranks, _HEADER + FIRST_ROWS * rows.shape[1]))
    _headers(message).copy_(torch.stack([counts, counts.max().expand(ranks)], dim=1))
    _slots(message)[destination[first], position[first]] = rows[first]

    arrived = torch.empty_like(message)
    dist.all_to_all_single(arrived, message, group=group)
    headers = _headers(arrived)
    received = headers[:, 0].tolist()
    first_rows = _slots(arrived)[torch.arange(FIRST_ROWS, device=rows.device) < headers[:, :1]]
    if int(headers[:, 1].max()) <= FIRST_ROWS:  # which all ranks know: each has every rank's largest count
        return first_rows, sent, received
    rest = _exchange_rows(rows[~first], _beyond_first(sent), _beyond_first(received), group)
    firsts = torch.split(first_rows, [min(count, FIRST_ROWS) for count in received])
    rests = torch.split(rest, _beyond_first(received))
    return torch.cat([piece for pair in zip(firsts, rests, strict=True) for piece in pair]), sent, received


def _headers(message: Tensor) -> Tensor:
    """int64 view [ranks, 2] of a message: rows for the rank, most rows that its sender has for any."""
    return message[:, :_HEADER].view(torch.int64)


def _slots(message: Tensor) -> Tensor:
    """uint8 view [ranks, FIRST_ROWS, bytes] of a message."""
    return torch.unflatten(message[:, _HEADER:], 1, (FIRST_ROWS, -1))


def _beyond_first(counts: list[int]) -> list[int]:
    return [max(0, count - FIRST_ROWS) for count in counts]


def _exchange_rows(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Byte rows uint8 [sum(sent), bytes], ordered by destination -> uint8 [sum(received), bytes] by source."""
    if group is None:
        return rows
    out = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(out, rows, received, sent, group=group)
    return out
