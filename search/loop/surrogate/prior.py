"""What is expected of every candidate before any probe: its seconds and its memory.

An estimate where there is one, else a generic guess of the trade-off's shape. `KernelScales` say
how far either may be off; `posterior.py` corrects them by the probes.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from planner.core.schema import DeviceInfo, Model, SwinConfig, TrainSetting
from planner.estimation.estimate import Estimate
from search.loop.space import Candidate, Space
from search.loop.surrogate.gaussian_process import KernelScales
from search.loop.surrogate.probe_cost import NUM_BLOCKS, guess_compile_seconds

Estimator = Callable[[Model, TrainSetting], "Estimate | None"]
Knot = tuple[Candidate, Estimate]  # an estimate and the candidate it is of


# How far off, in log terms. Judgements, not measurements: wide enough that a handful of probes
# overrules them (the benchmark injects errors of 0 to 20% to see), and refitted as probes come.
# That most of what a compiler gains is common to its modes and to attentions too is one of them:
# over 192 simulated devices the mean loss of ten minutes fell from 3.5 to 2.5%. On an H100 it makes
# a Swin-T 1.75 times as fast with fused attention and 1.80 with eager; 1.74 and 1.86 are predicted.
ESTIMATED_SECONDS = KernelScales(
    bias=0.5,
    axes={"precision": 0.04, "checkpointing": 0.03, "compile": 0.1, "attention": 0.3,
          "optimizer": 0.005},
    slope=0.01, overhead=0.03, arm=0.06, smooth=0.04, nugget=0.04, other=0.1, compiled=0.12,
    fused=0.05,
)  # fmt: skip
# Over several devices a step also waits for a link that nobody has measured: wide enough that
# probes find a slow one (on four simulated GPUs the mean loss fell from 10.7% to 1.8%).
SPREAD_SECONDS = replace(ESTIMATED_SECONDS, slope=0.08, overhead=0.2)
GUESSED_SECONDS = KernelScales(
    bias=3.0,
    axes={"precision": 0.4, "checkpointing": 0.15, "compile": 0.25, "attention": 0.3,
          "optimizer": 0.03},
    slope=0.02, overhead=0.5, arm=0.1, smooth=0.08, nugget=0.05, other=0.3, fused=0.1,
)  # fmt: skip
ESTIMATED_BYTES = KernelScales(
    bias=0.06,
    axes={"precision": 0.04, "checkpointing": 0.04, "compile": 0.1, "attention": 0.04,
          "optimizer": 0.02},
    slope=0.01, overhead=0.02, arm=0.04, smooth=0.03, nugget=0.02, other=0.04,
)  # fmt: skip
GUESSED_BYTES = KernelScales(
    bias=1.0,
    axes={"precision": 0.15, "checkpointing": 0.3, "compile": 0.2, "attention": 0.3,
          "optimizer": 0.05},
    slope=0.1, overhead=0.3, arm=0.1, smooth=0.1, nugget=0.03, other=0.3,
)  # fmt: skip


MIDDLE_BATCH = 16  # the second of an arm to be estimated


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
    seconds_scales: KernelScales
    bytes_scales: KernelScales
    basis: str
    compile_seconds: Mapping[str, float] = field(default_factory=guess_compile_seconds)


# Parts of a generic guess where nothing better is known; relative, so only their ratios matter.
# Bytes per image: Swin-T's at 224 px, 101.1 MiB in fp32 and 66.3 under autocast (native, traced).
_BYTES_PER_IMAGE = {
    "fp32": 101.1, "tf32": 101.1, "bf16": 66.3, "fp16": 66.3, "pure-bf16": 50.6, "fp8": 66.3,
}  # fmt: skip
# What stays of them: the input of each block (4C of about 4(16+49/32)C bytes per token) and one
# block at work of twelve; of stages, one stage at work of four, the first holding about half; with
# selective the results of matrix products and attention (10C of those 17C).
_KEPT = {"none": 1.0, "blocks": 0.15, "nested": 0.15, "stages": 0.5, "selective": 0.6}
# Derived: a forward is a third of forward and backward; recomputed once it adds a third. Of what
# selective recomputes nothing is a matrix product: about a third of a forward, a guess.
_RECOMPUTED = {"none": 1.0, "blocks": 4 / 3, "stages": 4 / 3, "nested": 5 / 3, "selective": 10 / 9}
# A guess with a wide spread: matrix units make about half of a step faster.
_SECONDS = {"fp32": 1.0, "tf32": 0.7, "bf16": 0.5, "fp16": 0.5, "pure-bf16": 0.5, "fp8": 0.5}
# What a step costs whatever its batch (launches, the optimizer), as images' worth of work: a guess
# whose own uncertainty (KernelScales.overhead) is as large.
OVERHEAD_IMAGES = {"cuda": 8.0, "cpu": 1.0}
_STATE_BYTES = 28_288_354 * 16  # Swin-T: parameter, gradient and two moments in fp32


def generic_prior(space: Space, device: DeviceInfo, num_blocks: int = NUM_BLOCKS) -> Prior:
    """A prior for a model nobody can estimate: the trade-off's shape, its scale unknown.

    `num_blocks` are the model's, for what compiling it takes.
    """
    return Prior(
        guesses=tuple(_generic_guess(c, device) for c in space.candidates),
        seconds_scales=GUESSED_SECONDS,
        bytes_scales=GUESSED_BYTES,
        basis="no estimate for this model: a generic guess, corrected by the probes",
        compile_seconds=guess_compile_seconds(device.kind, num_blocks),
    )


def _generic_guess(c: Candidate, device: DeviceInfo) -> Guess:
    setting = c.setting
    kind, share = setting.checkpointing.partition(":")[0], _checkpointed_share(setting)
    kept, recomputed = (1 + share * (of[kind] - 1) for of in (_KEPT, _RECOMPUTED))
    per_image = _BYTES_PER_IMAGE[setting.precision] * 2**20 * kept
    precision = 1.0 if device.kind == "cpu" else _SECONDS[setting.precision]
    work = setting.batch_size * precision * recomputed + OVERHEAD_IMAGES[device.kind]
    seconds = 0.01 * work * setting.accumulate
    return Guess(seconds, _STATE_BYTES + per_image * setting.batch_size)


def _checkpointed_share(setting: TrainSetting) -> float:
    """Of the blocks, that blocks:6 or blocks:every-2 checkpoints; 1 where it names no blocks."""
    kind, _, part = setting.checkpointing.partition(":")
    if kind != "blocks" or not part:
        return 1.0
    every = part.removeprefix("every-")
    return 1 / int(every) if every != part else min(int(part) / NUM_BLOCKS, 1.0)


def estimated_prior(
    space: Space,
    model: Model,
    device: DeviceInfo,
    estimator: Estimator,
    budget_bytes: int | None = None,
) -> Prior:
    """A prior from the estimate: its memory, and its step time where it predicts one.

    A step is affine in its batch, and its peak the largest of such: three batches of each arm are
    estimated (a small, a middle one, and the largest about to fit) and the others lie on the lines
    between, which are never below the estimate.
    """
    num_blocks = sum(model.depths) if isinstance(model, SwinConfig) else NUM_BLOCKS
    generic = generic_prior(space, device, num_blocks)
    arms: dict[str, list[Candidate]] = {}
    for c in sorted(space.candidates, key=lambda c: c.setting.batch_size):
        arms.setdefault(c.arm, []).append(c)
    lines = {
        arm: _estimated_line(ladder, lambda c: estimator(model, c.setting), device, budget_bytes)
        for arm, ladder in arms.items()
    }
    knots = [knot for line in lines.values() for knot in line.knots]
    if not knots:
        return generic
    scaled = _scaled(space, generic.guesses, knots, device)
    guesses = [
        lines[c.arm].guess(c, guess) if lines[c.arm].knots else guess
        for c, guess in zip(space.candidates, scaled, strict=True)
    ]
    timed = all(e.throughput is not None for _, e in knots)
    throughput = knots[0][1].throughput
    basis = throughput.basis if timed and throughput else "a guess, without rates of this device"
    several = any(c.setting.world_size > 1 for c in space.candidates)
    seconds_scales = SPREAD_SECONDS if several else ESTIMATED_SECONDS
    return Prior(
        guesses=tuple(guesses),
        seconds_scales=seconds_scales if timed else GUESSED_SECONDS,
        # The estimate is of a CUDA device: on a CPU its bytes are only roughly what RSS grows by.
        bytes_scales=ESTIMATED_BYTES if device.kind == "cuda" else replace(GUESSED_BYTES, bias=0.5),
        basis=f"memory: as estimated; time: {basis}",
        compile_seconds=generic.compile_seconds,
    )


@dataclass(frozen=True)
class _Line:
    """The estimates of an arm, smallest batch first, and the lines between them; beyond the last
    one on the line of the last two."""

    knots: tuple[Knot, ...]
    device: DeviceInfo

    def guess(self, c: Candidate, untimed: Guess) -> Guess:
        """The bytes and seconds of a candidate; its seconds `untimed` where none are estimated."""
        times = [e.throughput.step_seconds / known.setting.accumulate
                 for known, e in self.knots if e.throughput]  # fmt: skip
        is_timed = len(times) == len(self.knots)
        # Seconds per micro-batch are what is affine.
        seconds = self._at(c, times) * c.setting.accumulate if is_timed else untimed.seconds
        return Guess(seconds, self.num_bytes(c))

    def num_bytes(self, c: Candidate) -> float:
        return self._at(c, [float(estimate_bytes(e, self.device)) for _, e in self.knots])

    def _at(self, c: Candidate, values: Sequence[float]) -> float:
        batches = [float(known.setting.batch_size) for known, _ in self.knots]
        return _interpolate(float(c.setting.batch_size), batches, values)


def _estimated_line(
    ladder: Sequence[Candidate],
    estimate: Callable[[Candidate], Estimate | None],
    device: DeviceInfo,
    budget_bytes: int | None,
) -> _Line:
    # A step of one image is unlike all others (its strides are): it is taken to be on their line.
    ladder = [c for c in ladder if c.setting.batch_size > 1] or ladder
    middle = next((c for c in ladder[1:] if c.setting.batch_size >= MIDDLE_BATCH), ladder[-1])
    found: dict[int, Knot] = {}

    def add(c: Candidate) -> _Line:
        batch = c.setting.batch_size
        if batch not in found and (estimated := estimate(c)) is not None:
            found[batch] = c, estimated
        return _Line(tuple(found[batch] for batch in sorted(found)), device)

    if not add(ladder[0]).knots:
        return _Line((), device)
    line = add(middle)
    if len(line.knots) == 1:
        return line
    fitting = [c for c in ladder if budget_bytes is None or line.num_bytes(c) <= budget_bytes]
    return add(fitting[-1] if fitting else ladder[0])


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
    space: Space, generic: Sequence[Guess], knots: Sequence[Knot], device: DeviceInfo
) -> list[Guess]:
    """The generic guesses on the estimates' scale, for arms that nothing could be estimated of."""
    by_id = {c.id: g for c, g in zip(space.candidates, generic, strict=True)}
    pairs = [(by_id[c.id], e) for c, e in knots]
    bytes_ratio = median(estimate_bytes(e, device) / g.num_bytes for g, e in pairs)
    timed = [e.throughput.step_seconds / g.seconds for g, e in pairs if e.throughput]
    seconds_ratio = median(timed) if timed else 1.0
    return [Guess(g.seconds * seconds_ratio, g.num_bytes * bytes_ratio) for g in generic]
