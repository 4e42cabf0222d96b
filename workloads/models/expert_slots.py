"""Which routed expert lies in which slot, where there are more slots than experts, and how experts change slots.

Physical slots are numbered over the ranks of the EP group, each of which has equally many. An expert may have several;
its tokens are dealt out over them.
"""

import random
from collections.abc import Sequence

import torch

from workloads.models.parallel import Group, exchange_rows

Slots = tuple[int, ...]  # expert of each slot


def first_slots(experts: int, redundant: int) -> Slots:
    """Every expert in the slot of its number, and the first ones once more behind them."""
    return tuple(slot % experts for slot in range(experts + redundant))


def shuffled(slots: Slots, seed: str) -> Slots:
    """The same experts in other slots."""
    return tuple(random.Random(seed).sample(slots, len(slots)))


def tables(slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots of each expert int64 [experts, most], the unused ones -1; how many each has, int64 [experts])."""
    of_expert: list[list[int]] = [[] for _ in range(max(slots) + 1)]
    for slot, expert in enumerate(slots):
        of_expert[expert].append(slot)
    most = len(slots) - len(of_expert) + 1  # whatever the slots, so that a refresh has the same shape
    rows = [[*own, *[-1] * (most - len(own))] for own in of_expert]
    return torch.tensor(rows), torch.tensor([len(own) for own in of_expert])


def chosen_slots(topk_idx: torch.Tensor, of_expert: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """topk_idx int64 [T, K], experts or -1 -> their slots: consecutive tokens take an expert's slots in turn."""
    known = topk_idx.clamp(min=0)
    turn = torch.arange(len(topk_idx), device=topk_idx.device).unsqueeze(1) % counts[known]
    return torch.where(topk_idx < 0, topk_idx, of_expert[known, turn])


def sources(before: Slots, after: Slots, per_rank: int) -> list[int]:
    """A slot of `before` that each slot of `after` can get its expert from, on its own rank where there is one."""
    found = []
    for slot, expert in enumerate(after):
        holders = [old for old, held in enumerate(before) if held == expert]
        found.append(min(holders, key=lambda old: (old // per_rank != slot // per_rank, old)))
    return found


def move(group: Group, tensors: Sequence[torch.Tensor], before: Slots, after: Slots) -> None:
    """Bring whole experts to the slots of `after`, in place. tensors: [slots of this rank, ...]. Collective."""
    per_rank = len(before) // group.size
    came_from = sources(before, after, per_rank)
    ranks = [range(rank * per_rank, (rank + 1) * per_rank) for rank in range(group.size)]
    mine = ranks[group.rank]
    leaving = [[came_from[slot] for slot in slots if came_from[slot] in mine] for slots in ranks]
    arriving = [[slot for slot in mine if came_from[slot] in slots] for slots in ranks]
    rows = [old - mine.start for of_rank in leaving for old in of_rank]
    places = [slot - mine.start for of_rank in arriving for slot in of_rank]
    for tensor in tensors:
        received = exchange_rows(group, tensor[rows], list(map(len, leaving)), list(map(len, arriving)))
        tensor[places] = received
