"""The cells of a run that words on a command line mean, and what people call them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.show import SHORT
from orchestrator.verbs.arguments import UsageError

Json = dict[str, Any]
LISTED = 12  # cells that a message lists


def varied_labels(cells: Sequence[Json]) -> list[str]:
    """Keys of the labels in which the cells of a run differ."""
    keys = dict.fromkeys(key for cell in cells for key in cell["labels"])
    return [key for key in keys if len({cell["labels"].get(key) for cell in cells}) > 1]


def select(folder: Path, cells: Sequence[Json], words: Sequence[str]) -> list[Json]:
    """All cells without words. With words the one cell that each of them is the beginning of an id or of a label of;
    a label that is the word itself comes before those that only begin so.

    Raises UsageError where that is none, or several.
    """
    if not words:
        return list(cells)
    varied = varied_labels(cells)
    found = [cell for cell in cells if all(_begins(cell, word) for word in words)]
    exact = [cell for cell in found if all(word in _labels(cell) for word in words)]
    found = exact or found
    if len(found) == 1:
        return found
    asked = " ".join(words)
    if not found:
        raise UsageError(f"{folder.name} has no cell {asked!r}. Its cells are:\n{_listed(cells, varied)}")
    raise UsageError(
        f"{asked!r} means {len(found)} cells of {folder.name}; say which:\n{_listed(found, varied)}"
    )


def only_cell(folder: Path, cells: Sequence[Json], words: Sequence[str]) -> Json:
    """The cell that the words mean; they may be left out where the run has one cell. Raises UsageError."""
    found = select(folder, cells, words)
    if len(found) == 1:
        return found[0]
    listed = _listed(found, varied_labels(cells))
    raise UsageError(f"{folder.name} has {len(found)} cells; say which one, by its id or labels:\n{listed}")


def _listed(cells: Sequence[Json], varied: Sequence[str]) -> str:
    """One line for each: `c866982e6651 layerwise tp2`."""
    names = [
        " ".join([cell["id"][:SHORT], *(str(cell["labels"].get(key, "-")) for key in varied)])
        for cell in cells
    ]
    more = [f"and {len(names) - LISTED} more: `status` shows all"] if len(names) > LISTED else []
    return "\n".join(f"  {line}" for line in (*names[:LISTED], *more))


def _begins(cell: Json, word: str) -> bool:
    return str(cell["id"]).startswith(word) or any(label.startswith(word) for label in _labels(cell))


def _labels(cell: Json) -> list[str]:
    return [str(label) for label in cell["labels"].values()]
