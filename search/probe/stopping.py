"""When enough steps were timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from search.probe.interval import median_interval
from search.probe.protocol import ProbeRequest

# Steps' worth of time kept free before the deadline, to end in order: the steps on their way and
# the untimed one that looks at the loss and the phases.
_RESERVED_STEPS = 4
# Fewer samples than these may all have been disturbed: too few to give up on.
_SAMPLES_TO_GIVE_UP = 3


@dataclass(frozen=True)
class StopRule:
    """Judges the samples so far, in seconds per optimizer step.

    `started` and `deadline` are instants of `time.monotonic`.
    """

    request: ProbeRequest
    started: float
    deadline: float

    def is_enough(self, samples: Sequence[float]) -> bool:
        if not samples:
            return False
        if len(samples) >= self.request.max_steps or self.is_hopeless(samples):
            return True
        if len(samples) < self.request.min_steps:
            return False
        return self.is_precise(samples) or self.is_late(samples)

    def is_precise(self, samples: Sequence[float]) -> bool:
        """Whether the median is known to the precision asked for."""
        interval = median_interval(samples)
        return interval.certain and interval.half_width <= self.request.median_precision

    def is_hopeless(self, samples: Sequence[float]) -> bool:
        """Whether even the fastest median that the samples allow is too slow to matter."""
        wanted = self.request.give_up_images_per_second
        if wanted is None or len(samples) < _SAMPLES_TO_GIVE_UP:
            return False
        return self.best_images_per_second(samples) < wanted

    def best_images_per_second(self, samples: Sequence[float]) -> float:
        return images_per_step(self.request) / median_interval(samples).low

    def is_late(self, samples: Sequence[float]) -> bool:
        now = time.monotonic()
        reserve = _RESERVED_STEPS * max(samples)
        return (
            now - self.started >= self.request.max_measure_seconds or now + reserve >= self.deadline
        )

    def flags(self, samples: Sequence[float]) -> list[str]:
        """What is to be said of samples that ended for another reason than their precision."""
        if self.is_hopeless(samples):
            return [
                f"stopped early: at best {self.best_images_per_second(samples):.4g} images/s, "
                f"under the {self.request.give_up_images_per_second:.4g} that would matter"
            ]
        if self.is_precise(samples):
            return []
        interval = median_interval(samples)
        if not interval.certain:
            return [f"{len(samples)} samples are too few for an interval of the median"]
        return [f"the median is known to ±{interval.half_width:.1%} only"]


def images_per_step(request: ProbeRequest) -> int:
    """Images that one optimizer step sees on this device."""
    return request.setting.batch_size * request.setting.accumulate
