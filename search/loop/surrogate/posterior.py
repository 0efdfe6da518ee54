"""What the probes say of every candidate so far: seconds, memory, whether it fits, its cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import erf, exp, hypot, inf, log, sqrt

import numpy as np

from planner.core.schema import MeasurementRecord
from planner.core.schema.record import Expected, Range
from search.loop.contenders import Contender
from search.loop.space import Candidate, Space
from search.loop.surrogate.costs import ProbeCosts
from search.loop.surrogate.parts import BrokenParts
from search.loop.surrogate.prior import GUESSED_SECONDS, Prior
from search.loop.surrogate.process import Array, GaussianProcess, Mask
from search.probe.evidence import is_feasible, median_interval, slowed_by, usually_slowed_by

# Between processes the same setting repeats to about a percent, whatever the samples of one say:
# an assumption. On a shared CPU three repeats had a standard deviation of 2.2% (the median of
# sixteen settings, tests/truth/cpu_grid_2026-11-20.jsonl); of a GPU there are none yet.
REPEAT_SD = 0.01
# Of the budget: closer to it the allocator may give memory back and ask for it again, which slows a
# step, so that a probe there says little of the others. Assumptions.
CLOSE, CLOSE_SD = 0.96, 0.2
# What is slower than believed by more standard deviations of its noise has more noise: a judgement.
SURPRISE = 3.0
MEMORY_SD = 0.005
BROKEN = 0.1  # what runs with less than this probability is not probed
# Before anything ran: without it a model that gives NaN however it is run took 272 probes, one of
# each arm; with it 23, and what runs alone among many is found as soon.
SURELY_BROKEN = 1e-6
OVER_BY = 0.5  # standard deviations, that what did not fit needs more than there was: a judgement
NORMAL_95 = 1.96  # standard deviations to either side that hold 95% of a normal variable
LARGEST_LOG = 80.0  # e^80 is more than any rate or size, and is still a number
_erf = np.frompyfunc(erf, 1, 1)


@dataclass(frozen=True)
class Prediction:
    """What is expected of every candidate, by index: log means with standard deviations, `fits` the
    probability of staying in the budget, `runs` that of running at all, `excluded` what no probe is
    spent on any more, `log_rate` the log mean of images/s."""

    log_seconds: Array
    log_seconds_sd: Array
    log_bytes: Array
    log_bytes_sd: Array
    fits: Array
    runs: Array
    excluded: Mask
    log_rate: Array


class Posterior:
    """A prior with every probe's correction. `budget_bytes` None means nothing is known of it."""

    def __init__(self, space: Space, prior: Prior, budget_bytes: int | None) -> None:
        self.space, self.prior = space, prior
        self.budget_bytes = budget_bytes
        self.log_budget = log(budget_bytes) if budget_bytes else inf
        self.log_images = np.log([float(c.images) for c in space.candidates])
        guesses = prior.guesses
        self.seconds = GaussianProcess(space, prior.seconds_scales, (g.seconds for g in guesses))
        self.bytes = GaussianProcess(space, prior.bytes_scales, (g.num_bytes or 1 for g in guesses))
        self.costs = ProbeCosts(space, prior.compile_seconds)
        self.batch = np.array([c.setting.batch_size for c in space.candidates])
        self.arms = np.array([c.arm for c in space.candidates])
        self.settled = np.zeros(len(space), dtype=bool)  # it or its arm failed, or is too large
        self.proven = np.zeros(len(space), dtype=bool)
        self.broken_parts = BrokenParts(space)
        self.close: set[int] = set()  # what was slow so close to the limit that it says little
        self.records: dict[int, list[MeasurementRecord]] = {}
        self.told: list[MeasurementRecord] = []

    @property
    def time_is_guessed(self) -> bool:
        """Whether nobody knows the device's rates."""
        return self.prior.seconds_scales == GUESSED_SECONDS

    @property
    def excluded(self) -> Mask:
        """What no probe is spent on any more: what failed, what is known, and what shares too much
        with the failures. What was disturbed is known after a second probe, or where that is how
        the device runs."""
        known, usual = self.settled.copy(), ("", self.seconds.usual)
        clear = [i for i, r in self.records.items() if len(r) > 1 or slowed_by(r[0]) in usual]
        known[clear] = True
        least = BROKEN if self.seconds.indices else SURELY_BROKEN
        return np.asarray(known | (self.broken_parts.probabilities() < least))

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        """Learns from a probe of this space, whatever its end; once, though several tell of it that
        share what is believed."""
        index = self.space.index(candidate.setting)
        if index is None or any(record is known for known in self.told):
            return
        self.told.append(record)
        self.costs.observe(record)
        if record.inconclusive:
            return
        self.records.setdefault(index, []).append(record)
        if record.status == "measured":
            self._measured(index, record)
        elif record.status in ("out_of_memory", "timed_out"):
            self._exclude_from(index)
        else:
            self.broken_parts.broke(index)
            self.settled[index] = True
            self.settled |= self._arm(index) & (record.status != "crashed")
        if record.status == "out_of_memory":
            self._out_of_memory(index, record)
        self.seconds.usual = usually_slowed_by(r for found in self.records.values() for r in found)

    def _measured(self, index: int, record: MeasurementRecord) -> None:
        self.broken_parts.ran(index)
        interval = median_interval(record.step_seconds)
        spread = max(REPEAT_SD, log(interval.high / interval.low) / 4)
        is_close = log(record.used_bytes or 1) > log(CLOSE) + self.log_budget
        if is_close:
            spread = max(spread, CLOSE_SD)
        seconds, slowed = log(interval.median), slowed_by(record)
        if self.seconds.indices:
            # What is far slower than anything that is believed has a cause of its own (memory given
            # back and asked for again, close to the limit) and says little of the others.
            believed = self.seconds.predict(np.array([index]))[0] + self.seconds.slowness(slowed)[0]
            spread = max(spread, float(seconds - believed[-1]) / SURPRISE)
            if is_close and seconds - believed[-1] > CLOSE_SD:
                self.close.add(index)
        self.seconds.observe(index, seconds, spread, slowed)
        num_bytes = record.used_bytes
        if not num_bytes:
            return
        self.bytes.observe(index, log(num_bytes), MEMORY_SD)
        if self.budget_bytes is None or num_bytes <= self.budget_bytes:
            self.proven |= self._arm(index) & (self.batch <= self.batch[index])
        else:
            self._exclude_from(index)

    def _arm(self, index: int) -> Mask:
        return np.asarray(self.arms == self.arms[index])

    def _exclude_from(self, index: int) -> None:
        """This batch and all larger ones of its arm are out."""
        self.settled |= self._arm(index) & (self.batch >= self.batch[index])

    def _out_of_memory(self, index: int, record: MeasurementRecord) -> None:
        """Its need is only bounded from below: by the budget, and by what was believed of it."""
        if self.budget_bytes is None:
            return
        believed, sd = self.bytes.predict(np.array([index]))
        at_least = log(max(self.budget_bytes, record.used_bytes or 1))
        need = float(max(believed[0], at_least + OVER_BY * sd[0]))
        self.bytes.observe(index, need, max(0.02, sd[0] / 2))

    def predict(self) -> Prediction:
        log_seconds, seconds_sd = self.seconds.predict()
        log_bytes, bytes_sd = self.bytes.predict()
        return Prediction(
            log_seconds=log_seconds,
            log_seconds_sd=seconds_sd,
            log_bytes=log_bytes,
            log_bytes_sd=bytes_sd,
            fits=np.where(self.proven, 1.0, normal_cdf((self.log_budget - log_bytes) / bytes_sd)),
            runs=self.broken_parts.probabilities(),
            excluded=self.excluded,
            log_rate=self.log_images - log_seconds,
        )

    def improvement(self, predicted: Prediction, allowed: Mask, best_rate: float) -> Array:
        """The expected gain of a probe of each that is allowed, as a share of the best rate so
        far: the mean of max(rate / best - 1, 0) for a log-normal rate, times how probably it runs
        and fits."""
        mean, sd = predicted.log_rate - log(best_rate), predicted.log_seconds_sd
        above = np.exp(mean + 0.5 * sd * sd) * normal_cdf(mean / sd + sd)
        gains = np.maximum(above - normal_cdf(mean / sd), 0.0)
        return np.where(allowed, gains * predicted.fits * predicted.runs, 0.0)

    def ran(self) -> dict[int, Contender]:
        """What ran and fits, by index, in the order of their first probes; of a hot device with
        what heat did to each."""
        good = {
            i: Contender(records[0].setting, tuple(records))
            for i, records in self.records.items()
            if all(is_feasible(record, self.budget_bytes) for record in records)
        }
        if good and self.seconds.usual == "heat":
            slower, at = self.seconds.slowness("heat")[0][:-1], np.array(self.seconds.indices)
            for i, c in good.items():
                good[i] = replace(c, slower=tuple(np.exp(slower[at == i]).tolist()))
        return good

    def best(self) -> tuple[int, float] | None:
        """(index, images/s) of the fastest measured candidate that stays in the budget."""
        rates = [(i, c.rate) for i, c in self.ran().items()]
        return max(rates, key=lambda found: found[1], default=None)

    def expected(self, candidate: Candidate, phase: str) -> Expected | None:
        """What is expected of a probe of `candidate` now; None for a setting outside the space."""
        index = self.space.index(candidate.setting)
        if index is None:
            return None
        predicted = self.predict()
        slower, slower_sd = self.seconds.slowness(self.seconds.usual)
        log_rate = float(self.log_images[index] - predicted.log_seconds[index] - slower[-1])
        seconds_sd = hypot(predicted.log_seconds_sd[index], slower_sd, REPEAT_SD)
        bytes_sd = hypot(predicted.log_bytes_sd[index], MEMORY_SD)
        return Expected(
            phase=phase,
            basis="probes" if self.records else "prior",
            images_per_second=log_normal(log_rate, seconds_sd),
            used_bytes=log_normal(float(predicted.log_bytes[index]), bytes_sd),
            fits=None if self.budget_bytes is None else round(float(predicted.fits[index]), 4),
        )

    @property
    def least_bytes(self) -> int:
        """What the smallest candidate should need."""
        return int(exp(min(self.bytes.predict()[0].min(), LARGEST_LOG)))

    def probe_seconds(self, predicted: Prediction) -> Array:
        """Expected seconds of probing each candidate: start, compilation, then timed steps."""
        return self.costs.probing(predicted.log_seconds)


def log_normal(log_middle: float, sd: float) -> Range:
    """(low, middle, high) of a log-normal variable, to six digits; 95% lies between the first and
    the last."""
    logs = (log_middle - NORMAL_95 * sd, log_middle, log_middle + NORMAL_95 * sd)
    low, middle, high = (float(f"{exp(min(max(x, -LARGEST_LOG), LARGEST_LOG)):.6g}") for x in logs)
    return low, middle, high


def normal_cdf(z: Array) -> Array:
    return 0.5 * (1 + np.asarray(_erf(z / sqrt(2)), dtype=np.float64))
