"""What is believed of every candidate before and after probes: its memory and its seconds.

A prior guess (an estimate where there is one) times a residual learned from the probes. The
logarithm of the residual is a Gaussian process over the setting's factors: one term for the whole
scale, one per value of each axis, one for the slope over the batch, one smooth along the batches of
an arm, one per cell. A probe of one setting so corrects all that share a factor with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log2
from statistics import median

import numpy as np
from numpy.typing import NDArray

from planner.estimate import Estimate
from planner.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from search.space import AXES, Candidate, Space

Estimator = Callable[[SwinConfig, TrainSetting], "Estimate | None"]
Array = NDArray[np.float64]

SURE = 1.645  # standard deviations: one side of 90%, which is how estimates state their range


@dataclass(frozen=True)
class Trust:
    """How far a prior may be off: standard deviations of the log-ratio measured / prior, by term.

    `bias` is the whole scale, an axis's entry how much one of its values may deviate, `slope` the
    deviation per doubling of the batch, `overhead` that of what a step costs at any batch,
    `arm` a whole arm's own, `smooth` what bends along it, `cell` what nothing explains.
    They are starting points: a spread of all but the bias is fitted to the probes.
    """

    bias: float
    axes: dict[str, float]
    slope: float
    overhead: float
    arm: float
    smooth: float
    cell: float


# How far off, in log terms. Judgements, not measurements: wide enough that a handful of probes
# overrules them (the benchmark injects errors of 0 to 20% to see), and refitted as probes come.
ESTIMATED_SECONDS = Trust(
    bias=0.5,
    axes={"precision": 0.1, "checkpointing": 0.1, "compile": 0.15, "attention": 0.1,
          "optimizer": 0.02},
    slope=0.01, overhead=0.1, arm=0.08, smooth=0.05, cell=0.05,
)  # fmt: skip
GUESSED_SECONDS = Trust(
    bias=3.0,
    axes={"precision": 0.4, "checkpointing": 0.15, "compile": 0.25, "attention": 0.15,
          "optimizer": 0.03},
    slope=0.02, overhead=0.5, arm=0.1, smooth=0.08, cell=0.05,
)  # fmt: skip
ESTIMATED_BYTES = Trust(
    bias=0.1,
    axes={"precision": 0.05, "checkpointing": 0.05, "compile": 0.15, "attention": 0.05,
          "optimizer": 0.02},
    slope=0.01, overhead=0.02, arm=0.05, smooth=0.03, cell=0.02,
)  # fmt: skip
GUESSED_BYTES = Trust(
    bias=1.0,
    axes={"precision": 0.15, "checkpointing": 0.3, "compile": 0.2, "attention": 0.15,
          "optimizer": 0.05},
    slope=0.1, overhead=0.3, arm=0.1, smooth=0.1, cell=0.03,
)  # fmt: skip


MIDDLE_OCTAVE = 5.0  # log2 of batch 32, the middle of the ladder: where the slope turns
KNEE = 8.0  # the batch at which fixed and proportional cost are taken to be of one size


@dataclass(frozen=True)
class Guess:
    """The prior of one candidate: seconds of one optimizer step, and bytes at the peak."""

    seconds: float
    num_bytes: float


@dataclass(frozen=True)
class Prior:
    """A guess per candidate, how far each kind may be off, and what they rest on."""

    guesses: tuple[Guess, ...]
    seconds_trust: Trust
    bytes_trust: Trust
    basis: str


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


def generic_prior(space: Space, device: DeviceInfo) -> Prior:
    """A prior for a model nobody can estimate: the trade-off's shape, its scale unknown."""
    return Prior(
        guesses=tuple(_generic_guess(c, device) for c in space.candidates),
        seconds_trust=GUESSED_SECONDS,
        bytes_trust=GUESSED_BYTES,
        basis="no estimate for this model: a generic guess, corrected by the probes",
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

    Within an arm memory rises with the batch, so what lies beyond twice `budget_bytes` is not
    estimated setting by setting but scaled from the last that was: it cannot fit.
    """
    generic = generic_prior(space, device)
    estimates = _estimates(space, model, estimator, device, budget_bytes)
    if not any(estimates):
        return generic
    scaled = _scaled(generic.guesses, estimates, device)
    guesses = [
        _estimated_guess(e, guess, device) for e, guess in zip(estimates, scaled, strict=True)
    ]
    timed = all(e is None or e.throughput is not None for e in estimates)
    first = next(e for e in estimates if e is not None)
    basis = first.throughput.basis if timed and first.throughput else "no rates for this device"
    return Prior(
        guesses=tuple(_extended(space, estimates, guesses)),
        seconds_trust=ESTIMATED_SECONDS if timed else GUESSED_SECONDS,
        # The estimate is of a CUDA device: on a CPU its bytes are only roughly what RSS grows by.
        bytes_trust=ESTIMATED_BYTES if device.kind == "cuda" else replace(GUESSED_BYTES, bias=0.5),
        basis=f"memory: the estimate; time: {basis}",
    )


def _estimates(
    space: Space,
    model: SwinConfig,
    estimator: Estimator,
    device: DeviceInfo,
    budget_bytes: int | None,
) -> list[Estimate | None]:
    found: list[Estimate | None] = []
    beyond: set[str] = set()
    ordered = sorted(space.candidates, key=lambda c: (c.arm, c.setting.batch_size))
    for c in ordered:
        found.append(None if c.arm in beyond else estimator(model, c.setting))
        last = found[-1]
        if last and budget_bytes and estimate_bytes(last, device) > 2 * budget_bytes:
            beyond.add(c.arm)
    by_id = {c.id: e for c, e in zip(ordered, found, strict=True)}
    return [by_id[c.id] for c in space.candidates]


def estimate_bytes(estimate: Estimate, device: DeviceInfo) -> int:
    """The figure of an estimate that `record_bytes` of a probe on `device` is held against."""
    return estimate.device_total_bytes if device.kind == "cuda" else estimate.peak_live_bytes


def record_bytes(record: MeasurementRecord) -> int | None:
    """What a probe took of the device: all of the process on a GPU, growth of its RSS on a CPU."""
    known = (
        (record.device_bytes, record.peak_reserved_bytes, record.peak_allocated_bytes)
        if record.device.kind == "cuda"
        else (record.peak_allocated_bytes, record.device_bytes)
    )
    return next((n for n in known if n is not None), None)


def _scaled(
    generic: Sequence[Guess], estimates: Sequence[Estimate | None], device: DeviceInfo
) -> list[Guess]:
    """The generic guesses on the estimates' scale, for arms that nothing could be estimated of."""
    pairs = [(g, e) for g, e in zip(generic, estimates, strict=True) if e is not None]
    bytes_ratio = median(estimate_bytes(e, device) / g.num_bytes for g, e in pairs)
    timed = [e.throughput.step_seconds / g.seconds for g, e in pairs if e.throughput]
    seconds_ratio = median(timed) if timed else 1.0
    return [Guess(g.seconds * seconds_ratio, g.num_bytes * bytes_ratio) for g in generic]


def _estimated_guess(estimate: Estimate | None, guess: Guess, device: DeviceInfo) -> Guess:
    if estimate is None:
        return guess
    seconds = estimate.throughput.step_seconds if estimate.throughput else guess.seconds
    return Guess(seconds, float(estimate_bytes(estimate, device)))


def _extended(
    space: Space, estimates: Sequence[Estimate | None], guesses: Sequence[Guess]
) -> list[Guess]:
    """Guesses without an estimate, scaled from the largest batch of their arm that has one."""
    anchor: dict[str, tuple[Candidate, Guess]] = {}
    for c, e, guess in zip(space.candidates, estimates, guesses, strict=True):
        if e is not None and (c.arm not in anchor or c.images > anchor[c.arm][0].images):
            anchor[c.arm] = (c, guess)
    extended = []
    for c, e, guess in zip(space.candidates, estimates, guesses, strict=True):
        if e is None and c.arm in anchor:
            base, known = anchor[c.arm]
            ratio = c.setting.batch_size / base.setting.batch_size
            guess = Guess(known.seconds * c.images / base.images, known.num_bytes * ratio)
        extended.append(guess)
    return extended


class Residual:
    """The posterior of log(measured / prior) over all candidates, from the probes so far."""

    SPREADS = (0.25, 0.5, 1.0, 2.0, 4.0)

    def __init__(self, space: Space, trust: Trust) -> None:
        self.trust = trust
        self.codes = _axis_codes(space)
        self.arms = _codes(c.arm for c in space.candidates)
        batches = np.array([float(c.setting.batch_size) for c in space.candidates])
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
        """Log marginal likelihood of the probes, with a prior that keeps the spread near 1: few
        probes that agree by luck must not make it sure of what was never probed."""
        gram = self._gram(spread)
        values = np.array(self.values)
        _, log_det = np.linalg.slogdet(gram)
        fit = float(values @ np.linalg.solve(gram, values))
        return -0.5 * (fit + float(log_det)) - self._unlikely(spread)

    @staticmethod
    def _unlikely(spread: float) -> float:
        """Minus the log prior of a spread: normal in doublings, a sd of 1 upwards, ½ downwards."""
        doublings = log2(spread)
        return (2.0 if spread < 1 else 0.5) * doublings**2

    def _kernel(self, a: NDArray[np.intp], b: NDArray[np.intp], spread: float) -> Array:
        trust, octaves = self.trust, self.octaves
        total = np.zeros((len(a), len(b)))
        for axis, codes in self.codes.items():
            total += trust.axes[axis] ** 2 * (codes[a][:, None] == codes[b][None, :])
        total += trust.slope**2 * octaves[a][:, None] * octaves[b][None, :]
        total += trust.overhead**2 * self.fixed_share[a][:, None] * self.fixed_share[b][None, :]
        gap = octaves[a][:, None] - octaves[b][None, :]
        same_arm = self.arms[a][:, None] == self.arms[b][None, :]
        total += trust.arm**2 * same_arm
        total += trust.smooth**2 * np.exp(-0.5 * gap**2) * (0.5 + 0.5 * same_arm)
        total += trust.cell**2 * (a[:, None] == b[None, :])
        return trust.bias**2 + spread**2 * total

    def _variance(self, spread: float, at: NDArray[np.intp]) -> Array:
        trust = self.trust
        steady = sum(sd**2 for sd in trust.axes.values())
        steady += trust.arm**2 + trust.smooth**2 + trust.cell**2
        by_batch = np.square(trust.slope * self.octaves[at])
        by_batch += np.square(trust.overhead * self.fixed_share[at])
        return np.asarray(trust.bias**2 + spread**2 * (steady + by_batch))


def _axis_codes(space: Space) -> dict[str, NDArray[np.intp]]:
    return {a: _codes(getattr(c.setting, a) for c in space.candidates) for a in AXES}


def _codes(values: Iterable[str]) -> NDArray[np.intp]:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(v, len(numbers)) for v in values], dtype=np.intp)
