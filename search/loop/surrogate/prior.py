"""What is expected of every candidate before any probe: its seconds, its memory, and what a probe
of it costs to start, to compile and to time.

An estimate where there is one, else a generic guess of the trade-off's shape. `KernelScales` say
how far either may be off; `posterior.py` corrects them by the probes.
"""

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from planner.core.schema import DeviceInfo, MeasurementRecord, Model, SwinConfig, TrainSetting
from planner.core.schema.setting import COMPILE_MODES, COMPILED_FIELDS
from planner.estimation.device_estimator import few_batches
from planner.estimation.estimate import Estimate
from search.loop.space import Space
from search.loop.surrogate.process import Array, KernelScales
from search.probe.evidence import FROM_CACHE, HURRIED, STOPPED_EARLY

Estimator = Callable[[Model, TrainSetting], "Estimate | None"]

STARTUP_SECONDS = 5.0  # before the first probe says better: python, torch, building the model
TIMED_SECONDS = 5.0
TIMED_STEPS = 5
NUM_BLOCKS = 12  # Swin-T's
# What Swin-T takes to compile. Measured from nothing, default or reduce-overhead: 51 to 62 s on an
# H200 (five times), 72 and 81 s on an H100 (bf16, batches 64 to 768, torch 2.11, tests/truth/);
# 91 s on two cores of an AMD EPYC (fp32, torch 2.13, 2026-11-20).
COMPILE_SECONDS = {"cuda": 60.0, "cpu": 90.0}
# Times as long: 0.97 and 1.1 on that H200, 1.4 of a Swin-B on the H100; 0.99 to 1.06 of eight other
# models on an A100 (pytorch/pytorch#96191).
REDUCE_OVERHEAD = 1.1
# Part of it whatever the number of blocks: Swin-B's 24 took 100 to 143 s on that H100, and on that
# CPU two blocks 27 and four 28 s.
COMPILE_FIXED_SHARE = {"cuda": 0.5, "cpu": 0.15}
# Autotuning takes besides about 1.3 s for each matmul of another shape: an assumption between what
# is reported of single ones (0.6 to 1.1 s for 20 choices once the compilers are warm; 5.2 s in
# pytorch/pytorch#107983; 9.6 s the first, vllm-project/vllm@c85b49b docs/design/torch_compile.md).
# Four stages of a Swin have 60 shapes of matmuls in a step (derived: qkv, proj and two of the MLP
# in each, three reductions between them and the head, each forward and twice backward), however
# many blocks.
AUTOTUNE_SECONDS = 60 * 1.3
# What adamw-8bit compiles, a kernel for each shape of weights: 85 s were measured in a probe of one
# block on two busy CPU cores (torch 2.13, torchao 0.18, 2026-11-22).
EIGHT_BIT_SECONDS = 85.0
# Of its first compilation, what a graph takes that the compiler finds in its caches, which torch
# keeps from one process to the next by itself: 4.5 to 5.5 of 58 to 60 s on an H200
# (tests/truth/h200/tuned.jsonl).
AGAIN_SHARE = 0.09
# And what a graph takes of which most kernels are found there: the same in another mode. 42 of 62 s
# on an H200 (crowded.jsonl); of the processor's time 41% on a CPU and 51% beside an emulated GPU
# (torch 2.14, 2026-11-26).
ALIKE_SHARE = 0.7


class Compilation(NamedTuple):
    """What the compiler does in a first step. Settings that are alike in it compile as long."""

    mode: str
    options: tuple[Hashable, ...]  # the values of COMPILED_FIELDS
    updates: bool  # those of adamw-8bit too

    def guess(self, by_mode: Mapping[str, float]) -> float:
        """Seconds, from the guess for each mode."""
        return by_mode[self.mode] + self.updates * EIGHT_BIT_SECONDS

    def tuning(self, by_mode: Mapping[str, float]) -> float:
        """The part of it that autotuning takes, on the device."""
        is_tuned = self.mode.startswith("max-autotune")
        return max(by_mode[self.mode] - by_mode["default"], 0.0) if is_tuned else 0.0


def compilation_of(setting: TrainSetting) -> Compilation:
    options = tuple(getattr(setting, field) for field in COMPILED_FIELDS)
    return Compilation(setting.compile, options, setting.optimizer_implementation == "8bit")


def kernels_of(setting: TrainSetting, axes: Iterable[str]) -> tuple[Hashable, ...]:
    """A key that is equal for settings whose compiled graphs share most kernels, whatever the
    compile mode. Settings differ in `axes` and the batch. An optimizer steps outside of the graph,
    except adamw-8bit."""
    others = (axis for axis in axes if axis not in ("optimizer", "accumulate", "compile"))
    _, options, updates = compilation_of(setting)
    shared = (getattr(setting, axis) for axis in others)
    return (setting.batch_size, setting.compile != "off", options, updates, *shared)


def graph_of(setting: TrainSetting, axes: Iterable[str]) -> tuple[Hashable, ...]:
    """A key that is equal for settings that compile the same graph."""
    return (setting.compile, *kernels_of(setting, axes))


def guess_compile_seconds(
    device_kind: str = "cuda", num_blocks: int = NUM_BLOCKS
) -> dict[str, float]:
    """Seconds that compiling a step of a model of so many blocks takes, by mode."""
    fixed = COMPILE_FIXED_SHARE[device_kind]
    whole = COMPILE_SECONDS[device_kind] * (fixed + (1 - fixed) * num_blocks / NUM_BLOCKS)
    others = {"off": 0.0, "reduce-overhead": REDUCE_OVERHEAD * whole}
    seconds = dict.fromkeys(COMPILE_MODES, whole) | others
    tuning = AUTOTUNE_SECONDS * COMPILE_SECONDS[device_kind] / COMPILE_SECONDS["cuda"]
    return {m: s + tuning * m.startswith("max-autotune") for m, s in seconds.items()}


# How far off, in log terms. Judgements, not measurements: wide enough that a handful of probes
# overrules them (the benchmark injects errors of 0 to 20% to see), and refitted as probes come.
# One of these judgements is that most of what a compiler gains is common to its modes and to
# attentions: with it 192 simulated devices lost 2.5% in the mean after ten minutes, without it
# 3.5%. On an H100 compiling makes a Swin-T 1.75 times as fast with fused attention and 1.80 times
# with eager; 1.74 and 1.86 are predicted.
# An arm's own was 0.06: with 0.04 a search without a budget ends after 9.0 probes in place of 10.5,
# and loses as much (0.9%, the mean of 180 simulated devices of f01384b, seeds from 1000).
# `kernels` is what a precision makes of an attention, since torch has other kernels for it in each:
# 0.15 in place of 0 lowers what nine of ten searches of hot devices lose from 9.9% to 4.4%; other
# worlds do not change (18 devices each).
ESTIMATED_SECONDS = KernelScales(
    bias=0.5,
    axes={"precision": 0.04, "checkpointing": 0.03, "compile": 0.1, "attention": 0.3,
          "optimizer": 0.005},
    overhead=0.03, arm=0.04, nugget=0.04, other=0.1, compiled=0.12,
    fused=0.05, kernels=0.15,
)  # fmt: skip
# Nobody measured this link, so an exchange between devices may take 5 ms to 2.6 s longer than is
# predicted: an assumption. Each of these delays is as likely as none, so a first step that is slow
# counts as one that waited, until a step of another length refutes that. With these delays the
# search on four simulated GPUs lost 1.4% on average; with one half of the probability on no delay
# 2.5%, and with a standard deviation in place of delays 2.5% (72 devices on a slow link and 36 on a
# fast one, as of 52c49df, seeds from 100).
SPREAD_SECONDS = replace(ESTIMATED_SECONDS, delays=tuple(0.005 * 2**i for i in range(10)))
GUESSED_SECONDS = KernelScales(
    bias=3.0,
    axes={"precision": 0.4, "checkpointing": 0.15, "compile": 0.25, "attention": 0.3,
          "optimizer": 0.03},
    overhead=0.5, arm=0.1, nugget=0.05, other=0.3, fused=0.1,
)  # fmt: skip
ESTIMATED_BYTES = KernelScales(
    bias=0.06,
    axes={"precision": 0.04, "checkpointing": 0.04, "compile": 0.1, "attention": 0.04,
          "optimizer": 0.02},
    overhead=0.02, arm=0.04, nugget=0.02, other=0.04,
)  # fmt: skip
GUESSED_BYTES = KernelScales(
    bias=1.0,
    axes={"precision": 0.15, "checkpointing": 0.3, "compile": 0.2, "attention": 0.3,
          "optimizer": 0.05},
    overhead=0.3, arm=0.1, nugget=0.03, other=0.3,
)  # fmt: skip


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
# Bytes per image: Swin-T's at 224 px, 101.1 MiB in fp32 and 66.3 under autocast (native, recorded).
_BYTES_PER_IMAGE = {
    "fp32": 101.1, "tf32": 101.1, "bf16": 66.3, "fp16": 66.3, "pure-bf16": 50.6, "fp8": 66.3,
}  # fmt: skip
# What stays of them: the input of each block (4C of about 4(16+49/32)C bytes per token) and one
# block at work of twelve; of stages, one stage at work of four, the first holding about half; with
# selective the results of matrix products and attention (10C of those 17C).
_KEPT = {"none": 1.0, "blocks": 0.15, "stages": 0.5, "selective": 0.6}
# Derived: a forward is a third of forward and backward; recomputed once it adds a third. Of what
# selective recomputes nothing is a matrix product: about a third of a forward, a guess.
_RECOMPUTED = {"none": 1.0, "blocks": 4 / 3, "stages": 4 / 3, "selective": 10 / 9}
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
        guesses=tuple(_generic_guess(c.setting, device) for c in space.candidates),
        seconds_scales=GUESSED_SECONDS,
        bytes_scales=GUESSED_BYTES,
        basis="no estimate for this model: a generic guess, corrected by the probes",
        compile_seconds=guess_compile_seconds(device.kind, num_blocks),
    )


def _generic_guess(setting: TrainSetting, device: DeviceInfo) -> Guess:
    kind = setting.checkpointing.partition(":")[0]
    share = len(range(NUM_BLOCKS)[setting.chosen_blocks or slice(None)]) / NUM_BLOCKS
    kept, recomputed = (1 + share * (of[kind] - 1) for of in (_KEPT, _RECOMPUTED))
    per_image = _BYTES_PER_IMAGE[setting.precision] * 2**20 * kept
    precision = 1.0 if device.kind == "cpu" else _SECONDS[setting.precision]
    work = setting.batch_size * precision * recomputed + OVERHEAD_IMAGES[device.kind]
    seconds = 0.01 * work * setting.accumulate
    return Guess(seconds, _STATE_BYTES + per_image * setting.batch_size)


def estimated_prior(space: Space, model: Model, device: DeviceInfo, estimator: Estimator) -> Prior:
    """A prior from the estimate: its memory, and its step time where it predicts one.

    Few batches of each arm are estimated, and the others lie on the lines between. An arm of which
    nothing can be estimated has the generic guess, on the others' scale.
    """
    num_blocks = sum(model.depths) if isinstance(model, SwinConfig) else NUM_BLOCKS
    generic = generic_prior(space, device, num_blocks)
    ladders: dict[str, list[TrainSetting]] = {}
    for c in space.candidates:
        ladders.setdefault(c.arm, []).append(c.setting)
    lines = {
        arm: [e for setting in few_batches(ladder) if (e := estimator(model, setting)) is not None]
        for arm, ladder in ladders.items()
    }
    estimates = [estimate for line in lines.values() for estimate in line]
    if not estimates:
        return generic
    pairs = [(estimate, _generic_guess(estimate.setting, device)) for estimate in estimates]
    size = median(estimate_bytes(estimate, device) / g.num_bytes for estimate, g in pairs)
    timed = [e.throughput.step_seconds / g.seconds for e, g in pairs if e.throughput]
    is_timed = len(timed) == len(estimates)
    time = median(timed) if is_timed else 1.0
    guesses = [Guess(time * g.seconds, size * g.num_bytes) for g in generic.guesses]
    for i, c in enumerate(space.candidates):
        if line := lines[c.arm]:
            seconds, batch = guesses[i].seconds, c.setting.batch_size
            batches = [estimate.setting.batch_size for estimate in line]
            if is_timed:
                times = [_micro_batch_seconds(estimate) for estimate in line]
                seconds = c.setting.accumulate * _interpolate(batches, times, batch)
            sizes = [estimate_bytes(estimate, device) for estimate in line]
            guesses[i] = Guess(seconds, _interpolate(batches, sizes, batch))
    several = any(c.setting.world_size > 1 for c in space.candidates)
    seconds_scales = SPREAD_SECONDS if several else ESTIMATED_SECONDS
    throughput = estimates[0].throughput
    basis = throughput.basis if is_timed and throughput else "a guess, without rates of this device"
    return Prior(
        guesses=tuple(guesses),
        seconds_scales=seconds_scales if is_timed else GUESSED_SECONDS,
        # The estimate is of a CUDA device: on a CPU its bytes are only roughly what RSS grows by.
        bytes_scales=ESTIMATED_BYTES if device.kind == "cuda" else replace(GUESSED_BYTES, bias=0.5),
        basis=f"memory: as estimated; time: {basis}",
        compile_seconds=generic.compile_seconds,
    )


def estimate_bytes(estimate: Estimate, device: DeviceInfo) -> int:
    """The figure of an estimate that `used_bytes` of a probe on `device` is held against."""
    return estimate.device_total_bytes if device.kind == "cuda" else estimate.peak_live_bytes


def _micro_batch_seconds(estimate: Estimate) -> float:
    """Seconds of one micro-batch, which are affine in its images."""
    assert estimate.throughput is not None
    return estimate.throughput.step_seconds / estimate.setting.accumulate


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """The value at `x` of a line through points (by rising x), on with the slope of its ends;
    proportional where there is one point alone."""
    if len(xs) == 1:
        return ys[0] * x / xs[0]
    i = min(max(bisect(xs, x) - 1, 0), len(xs) - 2)
    slope = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])
    return max(ys[i] + slope * (x - xs[i]), 0.1 * min(ys))


class ProbeCosts:
    """Expected seconds of a probe of every candidate. `compile_seconds` is a guess by mode."""

    def __init__(self, space: Space, compile_seconds: Mapping[str, float]) -> None:
        self.guessed = compile_seconds
        self.startup: list[float] = []
        self.timed: list[float] = []
        self.compiled: dict[Compilation, list[float]] = {}
        self.axes = space.axes
        settings = [c.setting for c in space.candidates]
        self.compilations = [compilation_of(setting) for setting in settings]
        self.graphs = [graph_of(setting, space.axes) for setting in settings]
        self.kernels = [kernels_of(setting, space.axes) for setting in settings]
        self.cached: set[tuple[Hashable, ...]] = set()  # the graphs and kernels that were compiled

    def observe(self, record: MeasurementRecord) -> None:
        """Learns from a probe that was measured, or that ended early for no fault of its own."""
        compilation = compilation_of(record.setting)
        if record.status == "timed_out" and record.inconclusive and record.setting.compiles:
            # It would have taken longer: a search without a better guess doubles it.
            self.compiled.setdefault(compilation, []).append(2 * record.probe_seconds)
        if record.status != "measured":
            return
        timed = sum(record.step_seconds)
        compiling = record.compile_seconds or 0.0
        if not any(flag.startswith((HURRIED, STOPPED_EARLY)) for flag in record.flags):
            self.timed.append(timed)
        self.startup.append(max(record.probe_seconds - timed - compiling, 0.0))
        if record.compile_seconds is None:
            return
        graph, kernels = (key(record.setting, self.axes) for key in (graph_of, kernels_of))
        if graph not in self.cached and FROM_CACHE not in record.flags:
            is_alike = kernels in self.cached and not compilation.tuning(self.guessed)
            first = compiling / ALIKE_SHARE if is_alike else compiling
            self.compiled.setdefault(compilation, []).append(first)
        self.cached |= {graph, kernels}

    def compile_seconds(self, compilation: Compilation) -> float:
        """The median of equal compilations so far; else the guess, times what the others took of
        theirs. The seconds of autotuning stay as guessed: they pass on the device, and another mode
        says nothing of it."""
        if compilation in self.compiled:
            return median(self.compiled[compilation])
        if compilation.updates and compilation.mode != "off":
            updates = compilation_of(TrainSetting(optimizer="adamw-8bit"))
            return sum(map(self.compile_seconds, (compilation._replace(updates=False), updates)))
        pairs = [(median(seconds), c.guess(self.guessed)) for c, seconds in self.compiled.items()]
        ratios = [seconds / guess for seconds, guess in pairs if guess]
        tuning = compilation.tuning(self.guessed)
        return (compilation.guess(self.guessed) - tuning) * median(ratios or [1.0]) + tuning

    def probing(self, log_step_seconds: Array) -> Array:
        """Expected seconds of a whole probe of each candidate, given the log of its step's."""
        start = median(self.startup) if self.startup else STARTUP_SECONDS
        timing = min([TIMED_SECONDS, *self.timed])  # at least: slow steps take longer
        steps = TIMED_STEPS * np.exp(log_step_seconds)
        return np.asarray(start + self._compiling_now() + np.maximum(timing, steps))

    def _compiling_now(self) -> Array:
        """Expected seconds of compiling each candidate, with what the caches hold by now."""
        first = {c: self.compile_seconds(c) for c in set(self.compilations)}
        seconds = np.array([first[c] for c in self.compilations])
        for i, compilation in enumerate(self.compilations):
            if self.graphs[i] in self.cached:
                seconds[i] *= AGAIN_SHARE
            elif self.kernels[i] in self.cached:
                tuning = min(compilation.tuning(self.guessed), seconds[i])
                seconds[i] = tuning + ALIKE_SHARE * (seconds[i] - tuning)
        return seconds
