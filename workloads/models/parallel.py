"""Process groups of one rank, and the few collectives that the models are made of.

Every collective is one `all_to_all_single` of bytes: gloo sends neither BF16 nor float8 portably, and its ring
all-gather costs sixteen ranks of one host several times as much. Sums are taken locally in rank order, so that a
result does not depend on how a backend reduces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workloads.spec import Parallelism


@dataclass(frozen=True)
class Group:
    """This process within some processes. handle: None when it is alone."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def share(self, total: int, what: str) -> tuple[int, int]:
        """(start, length) of this rank's share of `total` equal things. ValueError when they do not divide."""
        if total % self.size:
            raise ValueError(
                f"{what} is {total}, which {self.size} ranks cannot share equally: choose a parallelism that "
                "divides it."
            )
        length = total // self.size
        return self.rank * length, length


ALONE = Group()


@dataclass(frozen=True)
class RankGroups:
    """Where one rank stands, see `workloads.spec.Parallelism`. pp: the ranks of all stages that hold the same shares
    of their layers, by stage."""

    world: Group = ALONE
    tp: Group = ALONE
    ep: Group = ALONE
    dp_rank: int = 0
    dp: int = 1
    pp: Group = ALONE

    @property
    def on_last_stage(self) -> bool:
        """Whether this rank has what follows the last layer: the head, and the drafter."""
        return self.pp.rank == self.pp.size - 1


def make_groups(parallelism: Parallelism, rank: int) -> RankGroups:
    """Groups of `rank`; collective over the default process group, which must exist unless there is one rank.

    Raises RuntimeError when the default process group is missing or has another size.
    """
    ranks, tp, ep, stage = parallelism.ranks, parallelism.tp, parallelism.ep, parallelism.stage_ranks
    if stage % ep:
        raise ValueError(f"parallelism.ep is {ep}, which does not divide the {stage} ranks of a stage.")
    if ranks == 1:
        return RankGroups()
    joined = dist.get_world_size() if dist.is_initialized() else 0
    if joined != ranks:
        raise RuntimeError(
            f"tp {tp} x dp {parallelism.dp} x pp {parallelism.pp} needs a process group of {ranks} ranks, but {joined} "
            "have joined: call torch.distributed.init_process_group in every rank first."
        )
    return RankGroups(
        world=Group(rank, ranks, dist.group.WORLD),
        tp=_contiguous(rank, tp, ranks),
        ep=_contiguous(rank, ep, ranks),
        dp_rank=rank % stage // tp,
        dp=parallelism.dp,
        pp=_group(rank, range(rank % stage, ranks, stage), ranks),
    )


def _contiguous(rank: int, size: int, ranks: int) -> Group:
    """The group of `size` neighbours that `rank` belongs to."""
    first = rank // size * size
    return _group(rank, range(first, first + size), ranks)


def _group(rank: int, members: range, ranks: int) -> Group:
    """The group of these of all ranks, of which `rank` is one."""
    if len(members) == 1:
        return ALONE
    if len(members) == ranks:
        return Group(rank, ranks, dist.group.WORLD)
    handle = dist.new_group(list(members), use_local_synchronization=True)
    return Group(members.index(rank), len(members), handle)


def _exchange(group: Group, chunks: torch.Tensor) -> torch.Tensor:
    """chunks [size, ...]: chunk r goes to rank r. Returns [size, ...], chunk r from rank r."""
    chunks = chunks.contiguous()
    received = torch.empty_like(chunks)
    if chunks.numel():  # every rank of the group has chunks of one shape, so all skip or none
        dist.all_to_all_single(_bytes(received), _bytes(chunks), group=group.handle)
    return received


def _chunks(group: Group, rows: torch.Tensor) -> torch.Tensor:
    return rows.view(group.size, rows.shape[0] // group.size, *rows.shape[1:])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def all_gather_rows(group: Group, rows: torch.Tensor) -> torch.Tensor:
    """rows [n, ...] of every rank, one under another in rank order: [size*n, ...]; n is equal on all ranks."""
    if group.size == 1:
        return rows
    return _exchange(group, rows.expand(group.size, *rows.shape)).flatten(0, 1)


def reduce_scatter_rows(group: Group, partial: torch.Tensor) -> torch.Tensor:
    """Sum over ranks of partial float64 [size*n, d], in rank order; returns this rank's rows [n, d]."""
    if group.size == 1:
        return partial
    received = _exchange(group, _chunks(group, partial))
    total = received[0]
    for addend in received[1:]:
        total += addend
    return total


def scatter_selected(group: Group, rows: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """This rank's share [n, ...] of rows [size*n, ...], row i taken from rank `owner[i]`.

    A selection and not a sum: adding the zeros of the other ranks would turn -0 into +0.
    """
    if group.size == 1:
        return rows
    received = _exchange(group, _chunks(group, rows))
    count = received.shape[1]
    mine = owner[group.rank * count : (group.rank + 1) * count]
    return received[mine, torch.arange(count, device=rows.device)]


def gather_selected(group: Group, rows: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """rows [n, ...] of every rank, row i taken from rank `owner[i]`; the result [n, ...] is on every rank."""
    if group.size == 1:
        return rows
    received = _exchange(group, rows.expand(group.size, *rows.shape))
    return received[owner, torch.arange(rows.shape[0], device=rows.device)]


def all_gather_columns(group: Group, columns: torch.Tensor) -> torch.Tensor:
    """columns [n, w] of every rank side by side in rank order: [n, size*w]."""
    if group.size == 1:
        return columns
    received = _exchange(group, columns.expand(group.size, *columns.shape))
    return received.transpose(0, 1).flatten(1)


def all_agree(group: Group, vote: bool) -> bool:
    """Whether every rank votes yes."""
    return largest(group, int(not vote)) == 0


def largest(group: Group, value: int) -> int:
    """The largest of all ranks' values."""
    if group.size == 1:
        return value
    held = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(held, dist.ReduceOp.MAX, group=group.handle)
    return int(held)


def send_to_next(pp: Group, states: Sequence[torch.Tensor]) -> None:
    """Give the next stage what it receives with `receive_from_previous`. The last one has no next."""
    for tensor in states:
        if tensor.numel():  # the receiver knows the shapes, too
            dist.send(_bytes(tensor.contiguous()), group=pp.handle, group_dst=pp.rank + 1)


def receive_from_previous(
    pp: Group, shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Tensors of `shapes` and `dtype` that the previous stage sends."""
    states = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    for tensor in states:
        if tensor.numel():
            dist.recv(_bytes(tensor), group=pp.handle, group_src=pp.rank - 1)
    return states


def exchange_rows(group: Group, rows: torch.Tensor, leaving: list[int], arriving: list[int]) -> torch.Tensor:
    """rows [sum(leaving), ...]: so many go to each rank, in order. Returns [sum(arriving), ...], from each rank."""
    if group.size == 1:
        return rows
    rows = rows.contiguous()
    received = rows.new_empty(sum(arriving), *rows.shape[1:])
    each = received[:1].nbytes if len(received) else rows[:1].nbytes
    received_sizes, sent_sizes = ([count * each for count in counts] for counts in (arriving, leaving))
    dist.all_to_all_single(_bytes(received), _bytes(rows), received_sizes, sent_sizes, group=group.handle)
    return received


def from_last(group: Group, values: torch.Tensor) -> torch.Tensor:
    """`values` of the last rank of the group, in the place of those of every rank."""
    if group.size > 1 and values.numel():
        dist.broadcast(values, group=group.handle, group_src=group.size - 1)
    return values


def everywhere(group: Group, values: Sequence[str]) -> list[str]:
    """Those of all ranks in rank order, each once, on every rank."""
    if group.size == 1:
        return list(values)
    gathered: list[Sequence[str]] = [[]] * group.size
    dist.all_gather_object(gathered, list(values), group=group.handle)
    return list(dict.fromkeys(value for of_rank in gathered for value in of_rank))


def gather_objects(group: Group, value: Any) -> Sequence[Any]:
    """Every rank's value in rank order on rank 0, nothing elsewhere."""
    if group.size == 1:
        return [value]
    gathered: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(value, gathered, dst=0, group=group.handle)
    return gathered or []
