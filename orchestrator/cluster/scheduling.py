"""Lays out cells as job arrays: who makes a reference that several of them need, and which array waits for which."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.cell import Cell, references, saved_state, served
from orchestrator.cluster.sbatch import shape
from orchestrator.starts import ARMS


@dataclass(frozen=True)
class Array:
    """One array to submit. cells: ids, in the order of its tasks. after: numbers of arrays of the same list that must
    have ended, since their cells make references of these or since the experiment may use no more of the cluster."""

    cells: tuple[str, ...]
    after: tuple[int, ...]


Needs = Mapping[str, Mapping[str, str]]  # of a cell: the references that another one makes, and which one


def needs(cells: Mapping[str, Cell], is_stored: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """For each cell: key of a reference or saved state that is not in the store -> the cell that makes it.

    A cell whose own start serves the key makes it, since that costs nothing; else the first that needs it. Nobody
    waits in a circle: where two cells serve each other, the one that would close the circle makes its own.
    """
    wanted = {name: _wanted(cell, is_stored) for name, cell in cells.items()}
    serving: dict[str, str] = {}
    for name, cell in cells.items():
        for key in _serves(cell):
            serving.setdefault(key, name)
    makers: dict[str, str] = {}
    found: dict[str, dict[str, str]] = {}
    for name in cells:
        _visit(name, wanted, serving, makers, found, set())
    return found


def _visit(
    name: str,
    wanted: Mapping[str, Sequence[str]],
    serving: Mapping[str, str],
    makers: dict[str, str],
    found: dict[str, dict[str, str]],
    waiting: set[str],
) -> None:
    """Settles the makers of a cell's keys, those of the cells that it waits for first. waiting: for this one."""
    if name in found:
        return
    waiting.add(name)
    for key in wanted[name]:
        maker = serving.get(key, name)
        if key not in makers and maker not in waiting:
            _visit(maker, wanted, serving, makers, found, waiting)
    waiting.remove(name)
    for key in wanted[name]:
        makers.setdefault(key, serving[key] if serving.get(key) in found else name)
    found[name] = {key: makers[key] for key in wanted[name] if makers[key] != name}


def _wanted(cell: Cell, is_stored: Callable[[str], bool]) -> list[str]:
    keys = [reference.key for reference in references(cell)]
    states = [saved_state(cell, arm) for arm in ARMS if cell["code"][arm] is not None]
    keys += [state.key for state in states if state is not None]
    return [key for key in dict.fromkeys(keys) if not is_stored(key)]


def _serves(cell: Cell) -> list[str]:
    return [key for arm in ARMS if cell["code"][arm] is not None for key in served(cell, arm)]


def levels(of: Needs) -> dict[str, int]:
    """0 for cells that wait for nobody of the list, else one more than the highest they wait for."""
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            makers = (maker for maker in of[name].values() if maker in of)
            found[name] = max((level(maker) + 1 for maker in makers), default=0)
        return found[name]

    for name in of:
        level(name)
    return found


def arrays(cells: Mapping[str, Cell], of: Needs, limit: int) -> list[Array]:
    """As few arrays as there can be: cells of one shape and level together, at most `limit` tasks each (less where
    cluster.array_limit says so). An array waits for those that hold makers of its cells; where cluster.max_jobs
    limits the experiment, also for the one before it, since Slurm's own limit is one array's.
    """
    level, together = levels(of), dict[tuple[int, bytes], list[str]]()
    for name, cell in cells.items():
        together.setdefault((level[name], shape(cell)), []).append(name)
    found: list[Array] = []
    place: dict[str, int] = {}
    for _, names in sorted(together.items(), key=lambda item: item[0][0]):
        cluster = cells[names[0]]["cluster"]
        size = min(limit, cluster["array_limit"] or limit)
        for first in range(0, len(names), size):
            chunk = names[first : first + size]
            after = {place[maker] for name in chunk for maker in of[name].values() if maker in place}
            if cluster["max_jobs"] is not None and found:
                after.add(len(found) - 1)
            place |= dict.fromkeys(chunk, len(found))
            found.append(Array(tuple(chunk), tuple(sorted(after))))
    return found
