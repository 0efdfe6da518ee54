"""What is expected of one probe, with its interval, as its record keeps it."""

from __future__ import annotations

from functools import cached_property
from math import exp, sqrt

from planner.core.schema.expected import Expected, Range
from search.loop.space import Candidate, Space
from search.loop.surrogate.posterior import MEMORY_SD, REPEAT_SD, Posterior, Prediction
from search.loop.surrogate.prior import Prior

NORMAL_95 = 1.96  # standard deviations to either side that hold 95% of a normal variable
LARGEST_LOG = 80.0  # e^80 is more than any rate or size, and is still a number


def expectation(
    posterior: Posterior, predicted: Prediction, candidate: Candidate, phase: str
) -> Expected | None:
    """What `predicted` says of a probe of `candidate`; None for a setting outside its space.

    The rate is that of the steps alone, as a probe measures it, however the search counts
    compilation.
    """
    index = posterior.space.index(candidate.setting)
    if index is None:
        return None
    log_rate = float(posterior.log_images[index] - predicted.log_seconds[index])
    seconds_sd, bytes_sd = predicted.log_seconds_sd[index], predicted.log_bytes_sd[index]
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


class PriorExpectation:
    """What the prior says of a probe, for a strategy that expects nothing itself."""

    def __init__(self, space: Space, prior: Prior, budget_bytes: int | None) -> None:
        self.space, self.prior, self.budget_bytes = space, prior, budget_bytes

    def __call__(self, candidate: Candidate, phase: str) -> Expected | None:
        return expectation(self._posterior, self._predicted, candidate, phase)

    @cached_property
    def _posterior(self) -> Posterior:
        """Made when it is first asked: the planner's own strategy seldom needs it."""
        return Posterior(self.space, self.prior, self.budget_bytes)

    @cached_property
    def _predicted(self) -> Prediction:
        return self._posterior.predict()
