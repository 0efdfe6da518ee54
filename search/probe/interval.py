"""The median of step times and the interval that holds it, by order statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Judgement: the usual 95%, two-sided.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class MedianInterval:
    """A median with the bounds between which the true one lies, in the samples' unit.

    `certain` is False where there are too few samples for the confidence: the bounds are then
    merely the smallest and the largest sample.
    """

    median: float
    low: float
    high: float
    certain: bool

    @property
    def half_width(self) -> float:
        """Half of the interval's width as a share of the median (0.01 is ±1%)."""
        return (self.high - self.low) / 2 / self.median


def median_interval(samples: Sequence[float]) -> MedianInterval:
    """The median of `samples` and its distribution-free confidence interval.

    The number of samples below the true median is Binomial(n, 1/2), so the k-th smallest and the
    k-th largest enclose it with probability 1 - 2 P(X < k): k is the largest that keeps this above
    `CONFIDENCE` (6 samples are needed for 95%). Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there is no median of no samples")
    ordered = sorted(samples)
    n = len(ordered)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    k = _enclosing_rank(n, (1 - CONFIDENCE) / 2)
    return MedianInterval(middle, ordered[max(k, 1) - 1], ordered[n - max(k, 1)], k >= 1)


def _enclosing_rank(n: int, tail: float) -> int:
    """The largest k with P(Binomial(n, 1/2) < k) <= tail; 0 where even k = 1 has more."""
    term = math.exp(-n * math.log(2))
    below = 0.0
    for k in range(n // 2 + 1):
        below += term
        if below > tail:
            return k
        term *= (n - k) / (k + 1)
    return n // 2
