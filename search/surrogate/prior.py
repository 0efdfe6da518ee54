"""What is believed of every candidate before and after probes: its memory and its seconds.

A prior guess (an estimate where there is one) times a residual learned from the probes. The
logarithm of the residual is a Gaussian process over the setting's factors: one term for the whole
scale, one per value of each axis, one for the slope over the batch, one smooth along the batches of
an arm, one per cell. A probe of one setting so corrects all that share a factor with it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from statistics import median

import numpy as np
from numpy.typing import NDArray

from planner.estimation import Estimate
from planner.schema import DeviceInfo, SwinConfig, TrainSetting
from search.space import AXES, Candidate, Space
from search.surrogate.probe_cost import NUM_BLOCKS, Array, guess_compile_seconds

Estimator = Callable[[SwinConfig, TrainSetting], "Estimate | None"]
Knot = tuple[Candidate, Estimate]  # an estimate and the candidate it is of


@dataclass(frozen=True)
class Trust:
    """How far a prior may be off: standard deviations of the log-ratio measured / prior, by term.

    `bias` is the whole scale, an axis's entry how much one of its values may deviate, `slope` the
    deviation per doubling of the batch, `overhead` that of what a step costs at any batch,
    `arm` that of a whole arm but its optimizer's implementation, `implementation` what that adds,
    `smooth` what bends along an arm, `cell` what nothing explains.
    They are starting points: probes that are further off widen all but the bias. Probes that agree
    do not narrow them: a few say little of what was not probed.
    """

    bias: float
    axes: dict[str, float]
    slope: float
    overhead: float
    arm: float
    smooth: float
    cell: float
    implementation: float = 0.005


# How far off, in log terms. Judgements, not measurements: wide enough that a handful of probes
# overrules them (the benchmark injects errors of 0 to 20% to see), and refitted as probes come.
ESTIMATED_SECONDS = Trust(
    bias=0.5,
    axes={"precision": 0.04, "checkpointing": 0.03, "compile": 0.1, "attention": 0.3,
          "optimizer": 0.005},
    slope=0.01, overhead=0.03, arm=0.06, smooth=0.04, cell=0.04,
)  # fmt: skip
GUESSED_SECONDS = Trust(
    bias=3.0,
    axes={"precision": 0.4, "checkpointing": 0.15, "compile": 0.25, "attention": 0.3,
          "optimizer": 0.03},
    slope=0.02, overhead=0.5, arm=0.1, smooth=0.08, cell=0.05,
)  # fmt: skip
ESTIMATED_BYTES = Trust(
    bias=0.06,
    axes={"precision": 0.04, "checkpointing": 0.04, "compile": 0.1, "attention": 0.04,
          "optimizer": 0.02},
    slope=0.01, overhead=0.02, arm=0.04, smooth=0.03, cell=0.02,
)  # fmt: skip
GUESSED_BYTES = Trust(
    bias=1.0,
    axes={"precision": 0.15, "checkpointing": 0.3, "compile": 0.2, "attention": 0.3,
          "optimizer": 0.05},
    slope=0.1, overhead=0.3, arm=0.1, smooth=0.1, cell=0.03,
)  # fmt: skip


MIDDLE_BATCH = 16  # the second of an arm to be estimated
MIDDLE_OCTAVE = 5.0  # log2 of batch 32, the middle of the ladder: where the slope turns
# Of the variance that nothing explains (a batch that suits the kernels, or does not): what all
# settings of a precision have in common at a batch, and what an optimizer's implementations have.
# Over the recorded CPU table the residuals of straight lines through an arm's batches correlate by
# 0.52 between arms of one precision; of a GPU nothing was measured.
RUNG_SHARE, FAMILY_SHARE = 0.45, 0.5
KNEE = 8.0  # the batch at which fixed and proportional cost are taken to be of one size


@dataclass(frozen=True)
class Guess:
    """The prior of one candidate: seconds of one optimizer step, and bytes at the peak."""

    seconds: float
    num_bytes: float


@dataclass(frozen=True)
class Prior:
    """A guess per candidate, how far each kind may be off, and what they rest on.

    `compile_seconds` is what compiling a step is guessed to take, by mode.
    """

    guesses: tuple[Guess, ...]
    seconds_trust: Trust
    bytes_trust: Trust
    basis: str
    compile_seconds: Mapping[str, float] = field(default_factory=guess_compile_seconds)


# Parts of a generic guess where nothing better is known; relative, so only their ratios matter.
# Bytes per image: Swin-T's at 224 px, 101.1 MiB in fp32 and 66.3 under autocast (native, traced).
_BYTES_PER_IMAGE = {"fp32": 101.1, "tf32": 101.1, "bf16": 66.3, "fp16": 66.3, "pure-bf16": 50.6}
# What stays of them: the input of each block (4C of about 4(16+49/32)C bytes per token) and one
# block at work of twelve; of stages, one stage at work of four, the first holding about half.
_KEPT = {"none": 1.0, "blocks": 0.15, "nested": 0.15, "stages": 0.5}
# Derived: a forward is a third of forward and backward; recomputed once it adds a third.
_RECOMPUTED = {"none": 1.0, "blocks": 4 / 3, "stages": 4 / 3, "nested": 5 / 3}
# A guess with a wide spread: matrix units make about half of a step faster.
_SECONDS = {"fp32": 1.0, "tf32": 0.7, "bf16": 0.5, "fp16": 0.5, "pure-bf16": 0.5}
# What a step costs whatever its batch (launches, the optimizer), as images' worth of work: a guess
# whose own uncertainty (Trust.overhead) is as large.
OVERHEAD_IMAGES = {"cuda": 8.0, "cpu": 1.0}
_STATE_BYTES = 28_288_354 * 16  # Swin-T: parameter, gradient and two moments in fp32


def generic_prior(space: Space, device: DeviceInfo, num_blocks: int = NUM_BLOCKS) -> Prior:
    """A prior for a model nobody can estimate: the trade-off's shape, its scale unknown.

    `num_blocks` are the model's, for what compiling it takes.
    """
    return Prior(
        guesses=tuple(_generic_guess(c, device) for c in space.candidates),
        seconds_trust=GUESSED_SECONDS,
        bytes_trust=GUESSED_BYTES,
        basis="no estimate for this model: a generic guess, corrected by the probes",
        compile_seconds=guess_compile_seconds(device.kind, num_blocks),
    )


def _generic_guess(c: Candidate, device: DeviceInfo) -> Guess:
    setting = c.setting
    kind = setting.checkpointing.partition(":")[0]
    per_image = _BYTES_PER_IMAGE[setting.precision] * 2**20 * _KEPT[kind]
    precision = 1.0 if device.kind == "cpu" else _SECONDS[setting.precision]
    work = setting.batch_size * precision * _RECOMPUTED[kind] + OVERHEAD_IMAGES[device.kind]
    seconds = 0.01 * work * setting.accumulate
    return Guess(seconds, _STATE_BYTES + per_image * setting.batch_size)


def estimated_prior(
    space: Space,
    model: SwinConfig,
    device: DeviceInfo,
    estimator: Estimator,
    budget_bytes: int | None = None,
) -> Prior:
    """A prior from the estimate: its memory, and its step time where it predicts one.

    A step is affine in its batch, and its peak the largest of such: three batches of each arm are
    estimated (a small, a middle one, and the largest about to fit) and the others lie on the lines
    between, which are never below the estimate.
    """
    generic = generic_prior(space, device, sum(model.depths))
    knots = _estimate_knots(space, model, estimator, device, budget_bytes)
    estimates = [e for found in knots.values() for _, e in found]
    if not estimates:
        return generic
    scaled = _scaled(space, generic.guesses, knots, device)
    guesses = [
        _between(c, knots[c.arm], guess, device) if knots[c.arm] else guess
        for c, guess in zip(space.candidates, scaled, strict=True)
    ]
    timed = all(e.throughput is not None for e in estimates)
    throughput = estimates[0].throughput
    basis = throughput.basis if timed and throughput else "no rates for this device"
    return Prior(
        guesses=tuple(guesses),
        seconds_trust=ESTIMATED_SECONDS if timed else GUESSED_SECONDS,
        # The estimate is of a CUDA device: on a CPU its bytes are only roughly what RSS grows by.
        bytes_trust=ESTIMATED_BYTES if device.kind == "cuda" else replace(GUESSED_BYTES, bias=0.5),
        basis=f"memory: the estimate; time: {basis}",
        compile_seconds=generic.compile_seconds,
    )


def _estimate_knots(
    space: Space,
    model: SwinConfig,
    estimator: Estimator,
    device: DeviceInfo,
    budget_bytes: int | None,
) -> dict[str, list[Knot]]:
    """Per arm up to three batches with their estimates, smallest first; none where it has none."""
    arms: dict[str, list[Candidate]] = {}
    for c in sorted(space.candidates, key=lambda c: c.setting.batch_size):
        arms.setdefault(c.arm, []).append(c)
    return {
        arm: _arm_knots(ladder, lambda c: estimator(model, c.setting), device, budget_bytes)
        for arm, ladder in arms.items()
    }


def _arm_knots(
    ladder: Sequence[Candidate],
    estimate: Callable[[Candidate], Estimate | None],
    device: DeviceInfo,
    budget_bytes: int | None,
) -> list[Knot]:
    # A step of one image is unlike all others (its strides are): it is taken to be on their line.
    ladder = [c for c in ladder if c.setting.batch_size > 1] or ladder
    first = estimate(ladder[0])
    if first is None:
        return []
    knots = [(ladder[0], first)]
    middle = next((c for c in ladder if c.setting.batch_size >= MIDDLE_BATCH), ladder[-1])
    wanted = [middle]
    if middle is not ladder[0] and (second := estimate(middle)) is not None:
        knots.append((middle, second))
        wanted = [_largest_to_fit(ladder, knots, device, budget_bytes)]
    for c in wanted:
        if all(c is not known for known, _ in knots) and (last := estimate(c)) is not None:
            knots.append((c, last))
    return sorted(knots, key=lambda knot: knot[0].setting.batch_size)


def _largest_to_fit(
    ladder: Sequence[Candidate],
    knots: Sequence[Knot],
    device: DeviceInfo,
    budget_bytes: int | None,
) -> Candidate:
    """The largest batch that the line through two estimates puts into the budget."""
    if budget_bytes is None:
        return ladder[-1]
    fitting = [c for c in ladder if _line(c, knots, device)[0] <= budget_bytes]
    return fitting[-1] if fitting else ladder[0]


def _between(c: Candidate, knots: Sequence[Knot], guess: Guess, device: DeviceInfo) -> Guess:
    """The bytes and seconds of a candidate on the lines between its arm's estimates."""
    num_bytes, seconds = _line(c, knots, device)
    return Guess(guess.seconds if seconds is None else seconds, num_bytes)


def _line(c: Candidate, knots: Sequence[Knot], device: DeviceInfo) -> tuple[float, float | None]:
    """(bytes, step seconds) by linear interpolation over the batch; beyond the last knot on the
    line of the last two. Seconds per micro-batch are what is affine."""
    batches = [float(known.setting.batch_size) for known, _ in knots]
    sizes = [float(estimate_bytes(e, device)) for _, e in knots]
    at = float(c.setting.batch_size)
    timed = [
        e.throughput.step_seconds / known.setting.accumulate for known, e in knots if e.throughput
    ]
    num_bytes = _interpolate(at, batches, sizes)
    if len(timed) < len(knots):
        return num_bytes, None
    return num_bytes, _interpolate(at, batches, timed) * c.setting.accumulate


def _interpolate(at: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Piecewise linear, on with the last slope; proportional where there is one point alone."""
    if len(xs) == 1:
        return ys[0] * at / xs[0]
    i = min(max(bisect(xs, at) - 1, 0), len(xs) - 2)
    slope = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])
    return max(ys[i] + slope * (at - xs[i]), 0.1 * min(ys))


def estimate_bytes(estimate: Estimate, device: DeviceInfo) -> int:
    """The figure of an estimate that `used_bytes` of a probe on `device` is held against."""
    return estimate.device_total_bytes if device.kind == "cuda" else estimate.peak_live_bytes


def _scaled(
    space: Space, generic: Sequence[Guess], knots: dict[str, list[Knot]], device: DeviceInfo
) -> list[Guess]:
    """The generic guesses on the estimates' scale, for arms that nothing could be estimated of."""
    by_id = {c.id: g for c, g in zip(space.candidates, generic, strict=True)}
    pairs = [(by_id[c.id], e) for found in knots.values() for c, e in found]
    bytes_ratio = median(estimate_bytes(e, device) / g.num_bytes for g, e in pairs)
    timed = [e.throughput.step_seconds / g.seconds for g, e in pairs if e.throughput]
    seconds_ratio = median(timed) if timed else 1.0
    return [Guess(g.seconds * seconds_ratio, g.num_bytes * bytes_ratio) for g in generic]


class Residual:
    """The posterior of log(measured / prior) over all candidates, from the probes so far."""

    SPREADS = (1.0, 1.4, 2.0, 2.8, 4.0)

    def __init__(self, space: Space, trust: Trust) -> None:
        self.trust = trust
        self.codes = _axis_codes(space)
        self.arms = _codes(c.arm for c in space.candidates)
        self.families = _codes(_family(c) for c in space.candidates)
        self.rungs = _codes((c.setting.precision, c.setting.batch_size) for c in space.candidates)
        batches = np.array([float(c.setting.batch_size) for c in space.candidates])
        self.cells = _codes(zip(self.families.tolist(), batches.tolist(), strict=True))
        self.octaves = np.log2(batches) - MIDDLE_OCTAVE
        # How much a fixed cost weighs: 1 at batch 1, nothing at large ones.
        self.fixed_share = np.log1p(KNEE / batches) / np.log1p(KNEE)
        self.indices: list[int] = []
        self.values: list[float] = []
        self.noises: list[float] = []

    def observe(self, index: int, log_ratio: float, noise: float) -> None:
        """A probe of candidate `index`; `noise` is the standard deviation of its log."""
        self.indices.append(index)
        self.values.append(log_ratio)
        self.noises.append(noise)

    def posterior(self, at: NDArray[np.intp] | None = None) -> tuple[Array, Array]:
        """(mean, standard deviation) of the log-ratio of each candidate in `at` (all of them)."""
        at = np.arange(len(self.arms)) if at is None else at
        if not self.indices:
            return np.zeros(len(at)), np.sqrt(self._variance(1.0, at))
        spread = max(self.SPREADS, key=self._evidence)
        seen = np.array(self.indices)
        solved = np.linalg.inv(self._gram(spread))
        cross = self._kernel(at, seen, spread)
        mean = cross @ solved @ np.array(self.values)
        reduction = np.einsum("ij,jk,ik->i", cross, solved, cross)
        return mean, np.sqrt(np.maximum(self._variance(spread, at) - reduction, 1e-10))

    def covariance(self, at: NDArray[np.intp]) -> Array:
        """The joint posterior covariance of the log-ratios of the candidates in `at`."""
        if not self.indices:
            return self._kernel(at, at, 1.0)
        spread = max(self.SPREADS, key=self._evidence)
        cross = self._kernel(at, np.array(self.indices), spread)
        solved = np.linalg.solve(self._gram(spread), cross.T)
        return np.asarray(self._kernel(at, at, spread) - cross @ solved)

    def _gram(self, spread: float) -> Array:
        seen = np.array(self.indices)
        return self._kernel(seen, seen, spread) + np.diag(np.square(self.noises) + 1e-8)

    def _evidence(self, spread: float) -> float:
        """Log marginal likelihood of the probes, with a prior that keeps the spread near 1."""
        gram = self._gram(spread)
        values = np.array(self.values)
        _, log_det = np.linalg.slogdet(gram)
        fit = float(values @ np.linalg.solve(gram, values))
        return -0.5 * (fit + float(log_det)) - self._unlikely(spread)

    @staticmethod
    def _unlikely(spread: float) -> float:
        """Minus the log prior of a spread: normal in doublings, with a standard deviation of 1."""
        return 0.5 * log2(spread) ** 2

    def _kernel(self, a: NDArray[np.intp], b: NDArray[np.intp], spread: float) -> Array:
        trust, octaves = self.trust, self.octaves
        total = np.zeros((len(a), len(b)))
        for axis, codes in self.codes.items():
            total += trust.axes[axis] ** 2 * (codes[a][:, None] == codes[b][None, :])
        total += trust.slope**2 * octaves[a][:, None] * octaves[b][None, :]
        total += trust.overhead**2 * self.fixed_share[a][:, None] * self.fixed_share[b][None, :]
        gap = octaves[a][:, None] - octaves[b][None, :]
        same_family = self.families[a][:, None] == self.families[b][None, :]
        total += trust.arm**2 * same_family
        total += trust.implementation**2 * (self.arms[a][:, None] == self.arms[b][None, :])
        total += trust.smooth**2 * np.exp(-0.5 * gap**2) * (0.5 + 0.5 * same_family)
        total += trust.cell**2 * RUNG_SHARE * (self.rungs[a][:, None] == self.rungs[b][None, :])
        total += trust.cell**2 * FAMILY_SHARE * (self.cells[a][:, None] == self.cells[b][None, :])
        own = 1 - RUNG_SHARE - FAMILY_SHARE
        total += trust.cell**2 * own * (a[:, None] == b[None, :])
        return trust.bias**2 + spread**2 * total

    def _variance(self, spread: float, at: NDArray[np.intp]) -> Array:
        trust = self.trust
        steady = sum(sd**2 for sd in trust.axes.values())
        steady += trust.arm**2 + trust.implementation**2 + trust.smooth**2 + trust.cell**2
        by_batch = np.square(trust.slope * self.octaves[at])
        by_batch += np.square(trust.overhead * self.fixed_share[at])
        return np.asarray(trust.bias**2 + spread**2 * (steady + by_batch))


def _axis_codes(space: Space) -> dict[str, NDArray[np.intp]]:
    return {a: _codes(getattr(c.setting, a) for c in space.candidates) for a in AXES}


def _family(c: Candidate) -> tuple[str, ...]:
    """What the implementations of one optimizer share: they differ in its phase of a step only."""
    values = (getattr(c.setting, axis) for axis in AXES if axis != "optimizer")
    return (*values, c.setting.optimizer_family)


def _codes(values: Iterable[Hashable]) -> NDArray[np.intp]:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(v, len(numbers)) for v in values], dtype=np.intp)
