"""What is expected of one probe, with its interval, as its record keeps it."""

from __future__ import annotations

from math import exp, hypot, sqrt

from planner.core.schema.record import Expected, Range
from search.loop.space import Candidate
from search.loop.surrogate.posterior import MEMORY_SD, REPEAT_SD, Posterior

NORMAL_95 = 1.96  # standard deviations to either side that hold 95% of a normal variable
LARGEST_LOG = 80.0  # e^80 is more than any rate or size, and is still a number


def expectation(posterior: Posterior, candidate: Candidate, phase: str) -> Expected | None:
    """What is expected of a probe of `candidate` now; None for a setting outside the space.

    The rate is that of the steps alone, as a probe measures it, however the search counts
    compilation.
    """
    index = posterior.space.index(candidate.setting)
    if index is None:
        return None
    predicted = posterior.predict()
    slower, slower_sd = posterior.seconds.slowness(posterior.seconds.usual)
    log_rate = float(posterior.log_images[index] - predicted.log_seconds[index] - slower[-1])
    seconds_sd = hypot(predicted.log_seconds_sd[index], slower_sd)
    bytes_sd = predicted.log_bytes_sd[index]
    knows_limit = posterior.budget_bytes is not None
    return Expected(
        phase=phase,
        basis="probes" if posterior.records else "prior",
        images_per_second=log_normal(log_rate, sqrt(seconds_sd**2 + REPEAT_SD**2)),
        used_bytes=log_normal(float(predicted.log_bytes[index]), sqrt(bytes_sd**2 + MEMORY_SD**2)),
        fits=round(float(predicted.fits[index]), 4) if knows_limit else None,
    )


def log_normal(log_middle: float, sd: float) -> Range:
    """(low, middle, high) of a log-normal variable, to six digits; 95% lies between the first and
    the last."""
    logs = (log_middle - NORMAL_95 * sd, log_middle, log_middle + NORMAL_95 * sd)
    low, middle, high = (float(f"{exp(min(max(x, -LARGEST_LOG), LARGEST_LOG)):.6g}") for x in logs)
    return low, middle, high
