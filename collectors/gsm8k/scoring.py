"""Scores GSM8K answers: the number after the final marker (strict), or the last number (flexible)."""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_MARKER = re.compile(
    r"(?:####|^A:)[ \t]*(.*)$", re.MULTILINE
)  # the dataset's own mark, and its authors' models' mark
_NEXT_QUESTION = re.compile(r"^\s*Question:", re.MULTILINE)  # a base model goes on inventing questions


@dataclass(frozen=True)
class Score:
    """strict, flexible: whether the answer is right under either rule; parsed: whether a marker was found."""

    strict: bool
    flexible: bool
    parsed: bool


def parse_number(text: str) -> Decimal | None:
    """Last number in `text`; commas, dollar signs and trailing points do not count. None without one."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def marked_answer(text: str) -> Decimal | None:
    """Number after the last `####` or `A:` at the start of a line, None where there is no such mark."""
    marked = _MARKER.findall(text)
    return parse_number(marked[-1]) if marked else None


def score(generated: str, reference: str) -> Score:
    """Score one generated solution against the reference solution.

    Raises ValueError when the reference itself has no marked answer.
    """
    expected = marked_answer(reference)
    if expected is None:
        raise ValueError(f"The reference solution has no marked answer: {reference[-80:]!r}")
    own = _NEXT_QUESTION.split(generated, maxsplit=1)[0]
    strict = marked_answer(own)
    return Score(
        strict=strict is not None and strict == expected,
        flexible=parse_number(own) == expected,
        parsed=strict is not None,
    )
