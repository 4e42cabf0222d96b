"""Overrides in, frozen cells out: every problem of every cell at once, and nothing frozen while there is one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from collectors.gsm8k.questions import Gsm8kError
from orchestrator.cell import Cell, cell_id
from orchestrator.config.compose import Composed, ConfigError, compose
from orchestrator.config.freeze import freeze
from orchestrator.config.schema import Root
from orchestrator.provenance import ProvenanceError
from orchestrator.rules.cell_rules import problems
from orchestrator.rules.checkpoint_rules import checkpoint_problems
from orchestrator.rules.cluster_rules import gpus_needed
from orchestrator.rules.engine_rules import engine_problems


@dataclass(frozen=True)
class Planned:
    """One valid cell with the config that it was frozen from, and the command line that plans it alone."""

    id: str
    cell: Cell
    root: Root
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    name: str
    store: str
    rerun: bool
    cells: list[Planned]


def plan(arguments: Sequence[str], multirun: bool = False, config_dir: str | None = None) -> Plan:
    """Cells that are equal in all that they measure are planned once. Raises ConfigError with all problems."""
    composed = compose(arguments, multirun, config_dir)
    own_files = () if config_dir is None else ("--config-dir", config_dir)
    cells: dict[str, Planned] = {}
    for one in composed:
        if one.root is None or (found := problems(one.root) or _outside(one.root)):
            one.problems += found if one.root is not None else []
            continue
        one.root.needs = one.root.needs or gpus_needed(one.root)
        try:
            frozen = freeze(one.root, one.labels)
        except (ProvenanceError, Gsm8kError) as error:
            one.problems.append(str(error))
            continue
        name = cell_id(frozen)
        cells.setdefault(name, Planned(name, frozen, one.root, (*own_files, *one.overrides)))
    wrong = _grouped(composed)
    roots = [one.root for one in composed if one.root is not None]
    if wrong or (wrong := _not_shared(roots)):
        raise ConfigError(wrong)
    root = roots[0]
    return Plan(root.name, root.store, root.rerun, list(cells.values()))


def _outside(root: Root) -> list[str]:
    """What is wrong with the things that a valid config names: engines and weights."""
    return [*engine_problems(root), *checkpoint_problems(root)]


def _grouped(composed: Sequence[Composed]) -> list[str]:
    """Each problem once, with the cells that have it where not all do."""
    having: dict[str, list[Composed]] = {}
    for one in composed:
        for problem in dict.fromkeys(one.problems):
            having.setdefault(problem, []).append(one)
    varied = {
        key for one in composed for key, value in one.labels.items() if value != composed[0].labels.get(key)
    }
    return [
        problem if len(cells) == len(composed) else f"{problem} ({_which(cells, varied)})"
        for problem, cells in having.items()
    ]


def _which(cells: Sequence[Composed], varied: set[str], limit: int = 4) -> str:
    names = [" ".join(f"{k}={v}" for k, v in one.labels.items() if k in varied) for one in cells[:limit]]
    more = f" and {len(cells) - limit} more" if len(cells) > limit else ""
    return f"in {len(cells)} cell{'s' if len(cells) > 1 else ''}: {'; '.join(names)}{more}"


def _not_shared(roots: Sequence[Root]) -> list[str]:
    """An experiment has one name and one store."""
    found = []
    for key in ("name", "store", "rerun"):
        values = sorted({str(getattr(root, key)) for root in roots})
        if len(values) > 1:
            found.append(
                f"{key} is {' and '.join(values)}: it belongs to the whole experiment and cannot be swept."
            )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", roots[0].name):
        found.append(f"name is {roots[0].name!r}; it names a folder: letters, digits, '.', '_' and '-'.")
    return found
