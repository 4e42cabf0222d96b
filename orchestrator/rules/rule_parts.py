"""Sentences that several rules share."""

import math
from collections.abc import Iterator
from typing import Any

Problems = Iterator[str]


def at_least(key: str, value: Any, least: int) -> Problems:
    if isinstance(value, int) and not isinstance(value, bool) and value < least:
        yield f"{key} is {value}; it must be at least {least}."


def one_of(key: str, value: str, options: list[str]) -> Problems:
    if value not in options:
        yield f"{key} is {value!r}; it must be one of: {', '.join(options)}."


def divides(key: str, divisor: int, of: str, value: int) -> Problems:
    if divisor < 1 or value % divisor:
        fitting = ", ".join(str(n) for n in range(1, min(value, 64) + 1) if value % n == 0)
        yield f"{key} is {divisor}, which does not divide {of}: use one of {fitting}."


def plain(key: str, value: Any) -> Problems:
    """Only what JSON can say reaches an engine: text, numbers, true, false, null, and lists and maps of them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(name, str):
                yield from plain(f"{key}.{name}", inner)
            else:
                yield f"{key} has the key {name!r}, which is not text: write it in quotes."
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from plain(f"{key}[{number}]", inner)
    elif not isinstance(value, str | int | float | None):
        yield f"{key} is {value!r}, which JSON cannot say: write text in quotes, a number, true, false or null."
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key} is {value}, which JSON cannot say: write a finite number."
