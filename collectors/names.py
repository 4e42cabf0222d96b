"""How much alike two names of one weight are, the checkpoint's and the engine's."""

import re
from collections import Counter


def likeness(name: str, path: str) -> tuple[int, int, int]:
    """Greater is more alike: equal numbers in the same order (layers, experts), then equal words at the end, then
    equal words anywhere."""
    ours, theirs = _words(name), _words(path)
    numbers = _common([w for w in ours if w.isdigit()], [w for w in theirs if w.isdigit()])
    shared = (Counter(ours) & Counter(theirs)).total()
    return numbers, _common(ours[::-1], theirs[::-1]), shared


def _words(name: str) -> list[str]:
    return re.findall(r"[^.:\[\]{}'\"/]+", name)


def _common(ours: list[str], theirs: list[str]) -> int:
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count
