"""Paired accuracy and throughput ratios: exact test, interval, and what they decide."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Two systems on the same questions. difference and interval are right-answer rates, left minus right.

    both, neither: questions that both or none answered; left_only, right_only: the discordant ones.
    p: exact McNemar, two-sided.
    """

    both: int
    left_only: int
    right_only: int
    neither: int
    difference: float
    low: float
    high: float
    p: float

    @property
    def questions(self) -> int:
        return self.both + self.left_only + self.right_only + self.neither


def paired(left: Sequence[bool], right: Sequence[bool], confidence: float = 0.95) -> Paired:
    """Compares answers question by question.

    p is the binomial probability, under fairness, of a split of the discordant questions at least as uneven
    (McNemar 1947, exact form). The interval adds half a question to each of the four cells and is Wald's on
    those counts (Agresti and Min 2005), which keeps its coverage when few or no questions are discordant.

    Raises ValueError for no questions or different numbers of them.
    """
    from scipy.stats import binomtest, norm  # takes a second, and few attempts compare accuracy

    if not left or len(left) != len(right):
        raise ValueError(
            f"Pairing needs the same questions on both sides: {len(left)} and {len(right)} are given."
        )
    pairs = list(zip(left, right, strict=True))
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    b, c = pairs.count((True, False)), pairs.count((False, True))
    p = float(binomtest(b, b + c, 0.5).pvalue) if b + c else 1.0
    n = len(pairs) + 2
    centre = (b - c) / n
    half = float(norm.ppf(0.5 + confidence / 2)) * math.sqrt((b + c + 1) / n - centre**2) / math.sqrt(n)
    return Paired(
        both, b, c, neither, (b - c) / len(pairs), max(-1.0, centre - half), min(1.0, centre + half), p
    )


def not_worse(low: float, high: float, margin: float) -> str:
    """PASS when the interval of left minus right lies above -margin, FAIL when all of it lies below,
    INCONCLUSIVE when it spans -margin."""
    if low > -margin:
        return "PASS"
    return "FAIL" if high < -margin else "INCONCLUSIVE"


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Median, and half the range over the median (None for one value): the run-to-run noise that was seen."""
    median = statistics.median(values)
    if len(values) < 2 or not median:
        return median, None
    return median, (max(values) - min(values)) / 2 / median
