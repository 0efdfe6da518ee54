"""What measurements are expected to be: a Gaussian process around the prior.

The logarithm of measured / prior has one term for the whole scale, one per value of each axis, one
for what a step costs at any batch, and a nugget. So a probe of one setting corrects all that share
a factor with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import hypot, sqrt

import numpy as np
from numpy.typing import NDArray

from search.loop.space import Candidate, Space

# Of the variance that nothing explains (a batch that suits the kernels, or does not): what all
# settings of a precision have in common at a batch, and what an optimizer's implementations have.
# Over the recorded CPU table the residuals of straight lines through an arm's batches correlate by
# 0.52 between arms of one precision; of a GPU nothing was measured.
RUNG_SHARE, FAMILY_SHARE = 0.45, 0.5
# Judgements: three times slower than expected is two such deviations, and one card in twelve is so.
STRANGE_PRECISION, STRANGE_UNLIKELY = 0.5, 2.5
# In logs, all assumed: by how much a probe is slower that heat or others slow, in the mean; how far
# each may be off that; and how far all may be that others slow, or that heat does, which is alike
# in about so many probes one after another.
SLOWED, SLOWED_SD, CROWDED_SD = 0.1, {"": 0.0, "heat": 0.02, "others": 0.08}, 0.1
HEAT_SD, HEAT_PROBES = 0.1, 15
KNEE = 8.0  # the batch at which fixed and per-image cost are assumed equal


@dataclass(frozen=True)
class KernelScales:
    """How far a prior may be off: standard deviations of the log-ratio measured / prior, by term.

    `bias` is the whole scale, an axis's entry how much one of its values may deviate (`other` where
    it has none), `overhead` that of what a step costs at any batch, `arm` that of a whole arm but
    its optimizer's implementation, `implementation` what that adds, `compiled` what compiling
    gains in all modes, `fused` what it makes of an attention, `kernels` what a precision makes of
    one, `nugget` what nothing explains. Probes that agree do not narrow them: a few say little of
    what was not probed.
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

    def of_axis(self, axis: str) -> float:
        return self.axes.get(axis, self.other)


@dataclass(frozen=True)
class Belief:
    """How far the prior may be off, and `unlikely`: minus the log of how probable that is before
    any probe. Each exchange takes `delay` longer than the prior says."""

    scales: KernelScales
    unlikely: float = 0.0
    delay: float = 0.0


def _beliefs(scales: KernelScales) -> list[Belief]:
    """That it is off as stated, that precisions are not what anybody expects, as a card emulates
    one, or that all is delayed."""
    beliefs = [Belief(scales)]
    if scales.of_axis("precision") < STRANGE_PRECISION:
        axes = {**scales.axes, "precision": STRANGE_PRECISION}
        beliefs.append(Belief(replace(scales, axes=axes), STRANGE_UNLIKELY))
    return beliefs + [replace(b, delay=delay) for b in beliefs for delay in scales.delays]


class GaussianProcess:
    """The posterior of the log of what is measured, over all candidates, from the probes so far.

    `prior` is what is expected of each candidate before any.
    """

    def __init__(self, space: Space, scales: KernelScales, prior: Iterable[float]) -> None:
        self.beliefs, self.prior = _beliefs(scales), np.array([*prior])
        self.exchanges = np.array([c.setting.num_exchanges for c in space.candidates])
        values = {a: [getattr(c.setting, a) for c in space.candidates] for a in space.axes}
        self.codes = {axis: _codes(found) for axis, found in values.items()}
        self.arms = _codes(c.arm for c in space.candidates)
        self.families = _codes(_family(c, space.axes) for c in space.candidates)
        self.compiled = _codes(c.setting.compile == "off" for c in space.candidates)
        self.fused = _codes(
            (c.setting.compile == "off", c.setting.attention) for c in space.candidates
        )
        self.kernels = _codes((c.setting.precision, c.setting.attention) for c in space.candidates)
        self.rungs = _codes((c.setting.precision, c.setting.batch_size) for c in space.candidates)
        batches = np.array([float(c.setting.batch_size) for c in space.candidates])
        self.cells = _codes(zip(self.families.tolist(), batches.tolist(), strict=True))
        # How much a fixed cost weighs: 1 at batch 1, nothing at large ones.
        self.fixed_share = np.log1p(KNEE / batches) / np.log1p(KNEE)
        self.indices: list[int] = []
        self.values: list[float] = []
        self.noises: list[float] = []
        self.slowed: list[str] = []
        self.usual = ""

    def observe(self, index: int, log_value: float, noise: float, slowed: str = "") -> None:
        """A probe of candidate `index`; `noise` is its standard deviation, `slowed` what slowed it
        ("heat", "others" or ""). Predicted is a device slowed by what is `usual`."""
        self.indices.append(index)
        self.values.append(log_value)
        self.noises.append(hypot(noise, SLOWED_SD[slowed]))
        self.slowed.append(slowed)

    def _expected(self, at: Indices, belief: Belief) -> Array:
        """The log of what the prior says, delayed."""
        return np.asarray(np.log(self.prior[at] + belief.delay * self.exchanges[at]))

    def _off(self, belief: Belief) -> Array:
        """The log of measured over expected, had the device run as it usually does."""
        return np.asarray(self.values - self._expected(self._seen(), belief) - self._assumed())

    def predict(self, at: Indices | None = None) -> tuple[Array, Array]:
        """(mean, standard deviation) of the log of each candidate in `at` (all of them)."""
        at = np.arange(len(self.arms)) if at is None else at
        belief = self._belief()
        cross, solved = self._solved(at, belief)
        mean = self._expected(at, belief) + solved.T @ self._off(belief)
        variance = self._kernel(at, at, belief) - (cross * solved.T).sum(axis=1)
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def _solved(self, at: Indices, belief: Belief) -> tuple[Array, Array]:
        """What those in `at` have in common with the probes, and that over what these have."""
        cross = self._kernel(at[:, None], self._seen(), belief)
        return cross, np.asarray(np.linalg.solve(self._gram(belief), cross.T))

    def _seen(self) -> Indices:
        return np.array(self.indices, dtype=np.intp)

    def _gram(self, belief: Belief) -> Array:
        by_others = np.array([slowed == "others" for slowed in self.slowed], dtype=bool)
        odd = CROWDED_SD * (by_others != (self.usual == "others"))
        noise, seen = np.diag(np.square(self.noises) + 1e-8) + odd[:, None] * odd, self._seen()
        noise += self._heat()
        return np.asarray(self._kernel(seen[:, None], seen, belief) + noise)

    def _heat(self, *following: str) -> Array:
        """What heat makes alike in the probes, by their order, and in those that follow."""
        hot = HEAT_SD * np.array([s == "heat" for s in (*self.slowed, *following)], dtype=bool)
        order = np.arange(len(hot))
        return np.asarray(hot[:, None] * hot * np.exp(-abs(order[:, None] - order) / HEAT_PROBES))

    def slowness(self, following: str) -> tuple[Array, float]:
        """The log by which each probe was slower than the device usually is, and last by which one
        should be that follows and is slowed so; with the standard deviation of that."""
        belief, heat = self._belief(), self._heat(following)
        solved = np.linalg.solve(self._gram(belief), heat[:-1])
        left = heat[-1, -1] - heat[-1, :-1] @ solved[:, -1]
        return self._assumed(following) + solved.T @ self._off(belief), sqrt(max(left, 0.0))

    def _assumed(self, *following: str) -> Array:
        """What is assumed of probes that were slowed, and of those that follow."""
        slowed = np.array([*self.slowed, *following], dtype=bool)
        return np.asarray(SLOWED * (slowed * 1.0 - bool(self.usual)))

    def _belief(self) -> Belief:
        """The most probable one, given the probes."""
        return max(self.beliefs, key=self._evidence)

    def _evidence(self, belief: Belief) -> float:
        """The log of how probable a belief is, given the probes."""
        gram, off = self._gram(belief), self._off(belief)
        _, log_det = np.linalg.slogdet(gram)
        fit = float(off @ np.linalg.solve(gram, off))
        return -0.5 * (fit + float(log_det)) - belief.unlikely

    def _kernel(self, a: Indices, b: Indices, belief: Belief) -> Array:
        """What each candidate of `a` has in common with that of `b`, whose shapes broadcast."""
        scales, shares = belief.scales, self.fixed_share
        total = sum(s**2 * (codes[a] == codes[b]) for s, codes in self._shared(scales))
        return np.asarray(total + scales.overhead**2 * shares[a] * shares[b])

    def _shared(self, scales: KernelScales) -> Iterator[tuple[float, Indices]]:
        """Each term that settings have in common whose codes are equal."""
        yield scales.bias, np.zeros(len(self.arms), dtype=np.intp)
        yield from ((scales.of_axis(axis), codes) for axis, codes in self.codes.items())
        yield scales.compiled, self.compiled
        yield scales.fused, self.fused
        yield scales.kernels, self.kernels
        yield scales.arm, self.families
        yield scales.implementation, self.arms
        yield scales.nugget * sqrt(RUNG_SHARE), self.rungs
        yield scales.nugget * sqrt(FAMILY_SHARE), self.cells
        yield scales.nugget * sqrt(1 - RUNG_SHARE - FAMILY_SHARE), np.arange(len(self.arms))


def _family(c: Candidate, axes: Iterable[str]) -> tuple[Hashable, ...]:
    """What the implementations of one optimizer share: they differ in its phase of a step only."""
    values = (getattr(c.setting, axis) for axis in axes if axis != "optimizer")
    return (*values, c.setting.optimizer_family)


def _codes(values: Iterable[Hashable]) -> Indices:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(v, len(numbers)) for v in values], dtype=np.intp)


Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
Values = NDArray[np.str_]
