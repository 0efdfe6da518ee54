"""When enough steps were timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from search.probe.evidence import HURRIED, STOPPED_EARLY, median_interval
from search.probe.protocol import ProbeRequest

# Steps' worth of time kept free before the deadline, to end in order: the steps on their way and
# the untimed one that looks at the loss and the phases.
_RESERVED_STEPS = 4
# Fewer samples than these may all have been disturbed: too few to give up on.
_SAMPLES_TO_GIVE_UP = 3
# A drift that matters, as a share, and the samples a quarter needs to show it.
_DRIFT = 0.01
_LEAST_QUARTER = 3


@dataclass(frozen=True)
class StopRule:
    """Judges the samples so far, in seconds per step.

    `started` and `deadline` are instants of `time.monotonic`.
    """

    request: ProbeRequest
    started: float
    deadline: float

    def is_enough(self, samples: Sequence[float]) -> bool:
        if not samples:
            return False
        if self.is_hopeless(samples):
            return True
        enough = len(samples) >= self.request.max_steps
        if not enough and len(samples) < self.request.min_steps:
            return self.is_ending(max(samples))
        if self.is_late(samples):
            return True
        if sum(samples) < self.request.min_measure_seconds:
            return False
        return enough or self.is_precise(samples)

    def is_precise(self, samples: Sequence[float]) -> bool:
        """Whether the median is known to the precision asked for."""
        interval = median_interval(samples)
        return interval.certain and interval.half_width <= self.request.median_precision

    def is_hopeless(self, samples: Sequence[float]) -> bool:
        """Whether even the fastest median that the samples allow is too slow to matter."""
        wanted = self.request.give_up_images_per_second
        if wanted is None or len(samples) < _SAMPLES_TO_GIVE_UP:
            return False
        if sum(samples) < self.request.give_up_seconds:
            return False
        return self.best_images_per_second(samples) < wanted

    def best_images_per_second(self, samples: Sequence[float]) -> float:
        return self.request.images_per_step / median_interval(samples).low

    def is_late(self, samples: Sequence[float]) -> bool:
        has_lasted = time.monotonic() - self.started >= self.request.max_measure_seconds
        return has_lasted or self.is_ending(max(samples))

    def is_ending(self, step_seconds: float, more_steps: int = 0) -> bool:
        """Whether the deadline is too near for `more_steps`: one sample in time says more than
        several that come too late."""
        reserve = (_RESERVED_STEPS + more_steps) * step_seconds
        return time.monotonic() + reserve >= self.deadline

    def flags(self, samples: Sequence[float]) -> list[str]:
        """What is to be said of the samples: why they ended, if not for their precision, and
        whether they drifted, where a device's clocks may have."""
        drifted = drift_flags(samples) if self.request.min_measure_seconds else []
        return self._why_ended(samples) + drifted

    def _why_ended(self, samples: Sequence[float]) -> list[str]:
        if self.is_hopeless(samples):
            return [
                f"{STOPPED_EARLY} at best {self.best_images_per_second(samples):.4g} a second, "
                f"under the {self.request.give_up_images_per_second:.4g} that would matter"
            ]
        if self.is_precise(samples):
            return []
        interval = median_interval(samples)
        if not interval.certain:
            few = f"{len(samples)} samples are" if len(samples) > 1 else "1 sample is"
            hurry = f"{HURRIED} " if len(samples) < self.request.min_steps else ""
            return [f"{hurry}{few} too few for an interval of the median"]
        return [f"the median is known to ±{interval.half_width:.1%} only"]


def drift_flags(samples: Sequence[float]) -> list[str]:
    """One flag where the last quarter of the samples took longer, or less long, than the first."""
    quarter = len(samples) // 4
    if quarter < _LEAST_QUARTER:
        return []
    first, last = median(samples[:quarter]), median(samples[-quarter:])
    if abs(last / first - 1) <= _DRIFT:
        return []
    return [
        f"drifted by {last / first - 1:+.1%} while steps were timed: {1000 * first:.4g} ms in the "
        f"first quarter, {1000 * last:.4g} ms in the last"
    ]
