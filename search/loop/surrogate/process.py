"""What measurements are expected to be: a Gaussian process around the prior.

The logarithm of measured / prior has one term for the whole scale, one per value of each axis, one
for what a step costs at any batch, and a nugget. So a probe of one setting corrects all that share
a factor with it. Of several beliefs in how far the prior may be off the likeliest one holds, except
for how much batches ripple: few probes do not tell that, so predictions are a mean over it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import hypot, sqrt

import numpy as np
from numpy.typing import NDArray

from planner.core.schema import TrainSetting
from search.loop.space import Space

# Of the variance that nothing explains (a batch that suits the kernels, or does not): what all
# settings of a precision have in common at a batch, and what an optimizer's implementations have.
# Over the recorded CPU table the residuals of straight lines through an arm's batches correlate by
# 0.52 between arms of one precision; of a GPU nothing was measured.
RUNG_SHARE, FAMILY_SHARE = 0.45, 0.5
# Judgements: three times slower than expected is two such deviations, and one card in twelve is so.
STRANGE_PRECISION, STRANGE_UNLIKELY = 0.5, 2.5
# How many times as wide as stated the nugget may be, each as likely: a judgement. The wider it may
# still be, the longer the search goes on.
RIPPLES = (1.0, 2.0, 3.0)
# How much slower a probe is that heat or other programs slow. Differences of logs, all assumed.
SLOWED = 0.1  # the mean
SLOWED_SD = {"": 0.0, "heat": 0.02, "others": 0.08}  # how far one probe is from the mean, by cause
CROWDED_SD = 0.1  # how far all probes that other programs slow are from it together
HEAT_SD, HEAT_PROBES = 0.1, 15  # the same of heat, which lasts for about so many probes in a row
KNEE = 8.0  # the batch at which fixed and per-image cost are assumed equal


@dataclass(frozen=True)
class KernelScales:
    """How far a prior may be off: standard deviations of the log-ratio measured / prior, by term.

    `bias` is the whole scale, an axis's entry how much one of its values may deviate (`other` where
    it has none), `overhead` that of what a step costs at any batch, `arm` that of a whole arm but
    its optimizer's implementation, `implementation` what that adds, `compiled` what compiling
    gains in all modes, `fused` what it makes of an attention, `kernels` what a precision makes of
    one, `nugget` what nothing explains. Probes that agree do not narrow them: a few say little of
    what was not probed. Batches that scatter widen the nugget (RIPPLES).
    `delays` are no deviations, but what each exchange of devices may take longer than the prior
    says; each of them is as likely as none.
    """

    bias: float
    axes: dict[str, float]
    arm: float
    nugget: float
    overhead: float = 0.0
    implementation: float = 0.005
    compiled: float = 0.0
    fused: float = 0.0
    kernels: float = 0.0
    other: float = 0.1
    delays: tuple[float, ...] = ()

    def axis_sd(self, axis: str) -> float:
        return self.axes.get(axis, self.other)


@dataclass(frozen=True)
class Belief:
    """How far the prior may be off, and `unlikely`: minus the log of how probable that is before
    any probe. Each exchange takes `delay` longer than the prior says."""

    scales: KernelScales
    unlikely: float = 0.0
    delay: float = 0.0


def _beliefs(scales: KernelScales) -> list[Belief]:
    """Every way in which the prior may be off: precisions as stated, or as nobody expects, since a
    card emulates one; batches that ripple as stated or more; with each delay, or none."""
    precisions = [(scales.axes, 0.0)]
    if scales.axis_sd("precision") < STRANGE_PRECISION:
        precisions.append(({**scales.axes, "precision": STRANGE_PRECISION}, STRANGE_UNLIKELY))
    return [
        Belief(replace(scales, axes=axes, nugget=ripple * scales.nugget), unlikely, delay)
        for axes, unlikely in precisions
        for ripple in RIPPLES
        for delay in (0.0, *scales.delays)
    ]


class GaussianProcess:
    """The posterior of the log of a measured quantity, over all candidates, from the probes so far.

    `prior` is what is expected of each candidate before any.
    """

    def __init__(self, space: Space, scales: KernelScales, prior: Iterable[float]) -> None:
        self.beliefs, self.prior = _beliefs(scales), np.array([*prior])
        settings = [c.setting for c in space.candidates]
        self.exchanges = np.array([s.num_exchanges for s in settings])
        self.codes = {a: codes_of(getattr(s, a) for s in settings) for a in space.axes}
        self.arms = codes_of(c.arm for c in space.candidates)
        self.families = codes_of(_family(s, space.axes) for s in settings)
        self.compiled = codes_of(s.compile == "off" for s in settings)
        self.fused = codes_of((s.compile == "off", s.attention) for s in settings)
        self.kernels = codes_of((s.precision, s.attention) for s in settings)
        self.rungs = codes_of((s.precision, s.batch_size) for s in settings)
        batches = np.array([float(s.batch_size) for s in settings])
        self.cells = codes_of(zip(self.families.tolist(), batches.tolist(), strict=True))
        # How much a fixed cost weighs: 1 at batch 1, nothing at large ones.
        self.fixed_share = np.log1p(KNEE / batches) / np.log1p(KNEE)
        self.indices: list[int] = []
        self.values: list[float] = []
        self.noises: list[float] = []
        self.slowed: list[str] = []
        self.usual_cause = ""

    def observe(self, index: int, log_value: float, noise: float, slowed: str = "") -> None:
        """Adds a probe of candidate `index`. `noise` is its standard deviation, `slowed` what
        slowed it ("heat", "others" or ""). Predictions are for a device that the `usual_cause`
        slows."""
        self.indices.append(index)
        self.values.append(log_value)
        self.noises.append(hypot(noise, SLOWED_SD[slowed]))
        self.slowed.append(slowed)

    def predict(self, subset: Indices | None = None) -> tuple[Array, Array]:
        """(mean, standard deviation) of the log of each candidate in `subset` (all of them), over
        all that batches may ripple."""
        subset = np.arange(len(self.arms)) if subset is None else subset
        beliefs, shares = self._probable_ripples()
        moments = [self._moments(subset, belief) for belief in beliefs]
        means, variances = (np.array(each) for each in zip(*moments, strict=True))
        mean = shares @ means
        variance = shares @ (variances + (means - mean) ** 2)
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def _moments(self, subset: Indices, belief: Belief) -> tuple[Array, Array]:
        """(mean, variance) under one belief."""
        cross = self._kernel(subset[:, None], self._probed(), belief)
        weights = np.linalg.solve(self._covariance(belief), cross.T)
        mean = self._log_prior(subset, belief) + weights.T @ self._residuals(belief)
        return mean, self._kernel(subset, subset, belief) - (cross * weights.T).sum(axis=1)

    def _probable_ripples(self) -> tuple[list[Belief], Array]:
        """The likeliest belief and those that differ from it only in how much batches ripple, with
        the probability of each."""
        best = self._likeliest_belief()
        usual = best.delay, best.scales.axes
        alike = [b for b in self.beliefs if (b.delay, b.scales.axes) == usual]
        evidence = np.array([self._log_evidence(belief) for belief in alike])
        shares = np.exp(evidence - evidence.max())
        return alike, shares / shares.sum()

    def slowness(self, following: str) -> tuple[Array, float]:
        """The log by which each probe was slower than the device usually is, and last by which a
        probe should be that follows and is slowed so; with the standard deviation of the last."""
        belief, heat = self._likeliest_belief(), self._heat_covariance(following)
        weights = np.linalg.solve(self._covariance(belief), heat[:-1])
        variance = heat[-1, -1] - heat[-1, :-1] @ weights[:, -1]
        mean = self._assumed_slowness(following) + weights.T @ self._residuals(belief)
        return mean, sqrt(max(variance, 0.0))

    def _likeliest_belief(self) -> Belief:
        return max(self.beliefs, key=self._log_evidence)

    def _log_evidence(self, belief: Belief) -> float:
        """The log of how probable a belief is, given the probes, up to a constant."""
        covariance, residuals = self._covariance(belief), self._residuals(belief)
        _, log_det = np.linalg.slogdet(covariance)
        fit = float(residuals @ np.linalg.solve(covariance, residuals))
        return -0.5 * (fit + float(log_det)) - belief.unlikely

    def _probed(self) -> Indices:
        return np.array(self.indices, dtype=np.intp)

    def _log_prior(self, subset: Indices, belief: Belief) -> Array:
        """The log of the prior of those candidates, with the delay of their exchanges."""
        return np.asarray(np.log(self.prior[subset] + belief.delay * self.exchanges[subset]))

    def _residuals(self, belief: Belief) -> Array:
        """The log of measured over expected, had the device run as it usually does."""
        expected = self._log_prior(self._probed(), belief)
        return np.asarray(self.values - expected - self._assumed_slowness())

    def _assumed_slowness(self, *following: str) -> Array:
        """By how much slowed probes are assumed to be slower, and those that follow."""
        slowed = np.array([*self.slowed, *following], dtype=bool)
        return np.asarray(SLOWED * (slowed * 1.0 - bool(self.usual_cause)))

    def _covariance(self, belief: Belief) -> Array:
        """The covariance of the probes: of their settings, their noise, and what slowed them."""
        by_others = np.array([slowed == "others" for slowed in self.slowed], dtype=bool)
        odd = CROWDED_SD * (by_others != (self.usual_cause == "others"))
        noise = np.diag(np.square(self.noises) + 1e-8) + odd[:, None] * odd
        probed = self._probed()
        kernel = self._kernel(probed[:, None], probed, belief)
        return np.asarray(kernel + noise + self._heat_covariance())

    def _heat_covariance(self, *following: str) -> Array:
        """What heat has in common for the probes, by their order, and for those that follow."""
        hot = HEAT_SD * np.array([s == "heat" for s in (*self.slowed, *following)], dtype=bool)
        order = np.arange(len(hot))
        return np.asarray(hot[:, None] * hot * np.exp(-abs(order[:, None] - order) / HEAT_PROBES))

    def _kernel(self, a: Indices, b: Indices, belief: Belief) -> Array:
        """The covariance of each candidate of `a` with that of `b`, whose shapes broadcast."""
        scales, shares = belief.scales, self.fixed_share
        total = sum(sd**2 * (codes[a] == codes[b]) for sd, codes in self._terms(scales))
        return np.asarray(total + scales.overhead**2 * shares[a] * shares[b])

    def _terms(self, scales: KernelScales) -> Iterator[tuple[float, Indices]]:
        """(standard deviation, codes) of each term: settings of equal codes have it in common."""
        yield scales.bias, np.zeros(len(self.arms), dtype=np.intp)
        yield from ((scales.axis_sd(axis), codes) for axis, codes in self.codes.items())
        yield scales.compiled, self.compiled
        yield scales.fused, self.fused
        yield scales.kernels, self.kernels
        yield scales.arm, self.families
        yield scales.implementation, self.arms
        yield scales.nugget * sqrt(RUNG_SHARE), self.rungs
        yield scales.nugget * sqrt(FAMILY_SHARE), self.cells
        yield scales.nugget * sqrt(1 - RUNG_SHARE - FAMILY_SHARE), np.arange(len(self.arms))


def _family(setting: TrainSetting, axes: Iterable[str]) -> tuple[Hashable, ...]:
    """What the implementations of one optimizer share: they differ in its phase of a step only."""
    values = (getattr(setting, axis) for axis in axes if axis != "optimizer")
    return (*values, setting.optimizer_family)


def codes_of(values: Iterable[Hashable]) -> Indices:
    """A number for each value, the same for equal ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(v, len(numbers)) for v in values], dtype=np.intp)


Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
Values = NDArray[np.str_]
