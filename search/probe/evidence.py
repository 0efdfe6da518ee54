"""What records of one setting prove: its rate, its memory, whether it fits, what disturbed it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.core.schema import MeasurementRecord

REPEAT_SHARE = 0.01  # two processes of one setting differ by about this, whatever each one says
# The flag of a probe whose compile_seconds are less than those of a first compilation.
FROM_CACHE = "compiled from a cache: compile_seconds is less than a first compile"
HURRIED = "hurried by the deadline:"  # how a flag begins of a probe that took fewer steps for it
STOPPED_EARLY = "stopped early:"  # how a flag begins of a probe that could not win any more
THROTTLED = "throttled:"  # how the flag begins of a probe during which the device was
# Words of the flags of a probe whose samples may be slower than the device is by itself.
DISTURBANCES = (
    THROTTLED, "other processes on the GPU", "other processes took", "drifted by", HURRIED,
)  # fmt: skip
# Two samples or one show no spread: another may last half as long or twice. A judgement.
FEW_SAMPLES, FEW_SPREAD = 3, 2.0


def is_disturbed(record: MeasurementRecord) -> bool:
    """Whether something slowed the probe that another time would not: heat, others, drift."""
    return any(word in flag for flag in record.flags for word in DISTURBANCES)


def was_throttled(record: MeasurementRecord) -> bool:
    return any(flag.startswith(THROTTLED) for flag in record.flags)


def slowed_by(record: MeasurementRecord) -> str:
    """What disturbed a probe that was measured: "heat" or "others"; "" where nothing did."""
    if record.status != "measured" or not is_disturbed(record):
        return ""
    return "heat" if was_throttled(record) else "others"


def usually_slowed_by(records: Iterable[MeasurementRecord]) -> str:
    """What slows the probes of a device as it usually runs, and so will the training: "heat" where
    most were throttled, "others" where all were disturbed by them, else "". One alone does not say
    so."""
    kinds = [slowed_by(record) for record in records if record.status == "measured"]
    if kinds.count("heat") > max(len(kinds) / 2, 1):
        return "heat"
    return "others" if kinds.count("others") == len(kinds) > 1 else ""


def usual(records: Sequence[MeasurementRecord], is_hot: bool) -> list[MeasurementRecord]:
    """The records of a device as it usually runs: throttled where it `is_hot`, else undisturbed;
    all where there are none such. Others are faster or slower for a reason of their own."""
    return [r for r in records if is_usual(r, is_hot)] or list(records)


def is_usual(record: MeasurementRecord, is_hot: bool) -> bool:
    return was_throttled(record) if is_hot else not is_disturbed(record)


def rate_interval(images: int, samples: Sequence[float]) -> tuple[float, float]:
    """Images/s, (low, high): the samples' 95% interval, never narrower than
    the difference between two processes that run one setting, and wide where there are few.

    `images` of one optimizer step, `samples` its seconds.
    """
    interval = median_interval(samples)
    margin = FEW_SPREAD if len(samples) < FEW_SAMPLES else 1 + REPEAT_SHARE / 2
    return images / (interval.high * margin), images * margin / interval.low


def is_feasible(record: MeasurementRecord, budget_bytes: int | None) -> bool:
    """Whether a probe ran to its end within the budget."""
    if record.status != "measured" or not record.step_seconds:
        return False
    num_bytes = record.used_bytes
    return budget_bytes is None or num_bytes is None or num_bytes <= budget_bytes


def price_of_compiling(records: Sequence[MeasurementRecord]) -> float:
    """Seconds that compiling a setting takes: the longest of its probes. In the others the compiler
    found its work of before in a cache."""
    return max(r.compile_seconds or 0.0 for r in records)


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
