"""Which engine starts a list of cells needs, and in which order it needs fewest: starts are what a run costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.cell import Cell, Reference, references, saved_state, second_run, served

ARMS = ("base", "candidate")  # in the order in which a driver runs them


@dataclass(frozen=True)
class Source:
    """Where a reference of a cell comes from. by: number of the cell of the list whose own start (`is_served`) or
    whose gang makes it; None: it is in the store."""

    reference: Reference
    by: int | None
    is_served: bool


@dataclass(frozen=True)
class Starts:
    """Engine starts of one cell, and the sources of its references."""

    count: int
    sources: tuple[Source, ...]


def engine_starts(cells: Sequence[Cell], is_stored: Callable[[str], bool]) -> list[Starts]:
    """For cells that run in this order, on a store of which `is_stored` knows the references by key."""
    made: dict[str, tuple[int, bool]] = {}
    return [_cell_starts(number, cell, is_stored, made) for number, cell in enumerate(cells)]


def _cell_starts(
    number: int, cell: Cell, is_stored: Callable[[str], bool], made: dict[str, tuple[int, bool]]
) -> Starts:
    count, found = 0, []
    for arm in ARMS:
        if cell["code"][arm] is None:
            continue
        attached = cell["backend"].get("url") is not None
        count += (not attached) + bool(second_run(cell))  # the scenario
        state = saved_state(cell, arm)
        if state is not None and state.key not in made and not is_stored(state.key):
            count += sum(step.do == "start" for step in state.steps)
            made[state.key] = (number, False)
        own = served(cell, arm)
        for reference in references(cell):
            key = reference.key
            if reference.arm != arm:
                continue
            if key not in made and not is_stored(key):
                count += key not in own
                made[key] = (number, key in own)
            by, is_served = made.get(key, (None, False))
            found.append(Source(reference, by, is_served))
    return Starts(count, tuple(found))


def cheapest_order(cells: Sequence[Cell]) -> list[int]:
    """Numbers of the cells in an order in which nobody builds a reference that a later cell's start would make
    anyway; otherwise as they come."""
    serves = [{key for arm in _arms(cell) for key in served(cell, arm)} for cell in cells]
    needs = [
        {reference.key for reference in references(cell)} - own
        for cell, own in zip(cells, serves, strict=True)
    ]
    waiting, order = list(range(len(cells))), list[int]()
    built: set[str] = set()
    while waiting:
        ready = (n for n in waiting if not _waits(needs[n] - built, [serves[o] for o in waiting if o != n]))
        chosen = next(ready, waiting[0])
        waiting.remove(chosen)
        order.append(chosen)
        built |= needs[chosen] | serves[chosen]
    return order


def _arms(cell: Cell) -> list[str]:
    return [arm for arm in ARMS if cell["code"][arm] is not None]


def _waits(needed: set[str], others: Sequence[set[str]]) -> bool:
    return any(needed & other for other in others) if needed else False
