"""What a probe costs to start, to compile, to time: a guess, then as the probes so far took."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.setting import COMPILE_MODES, COMPILED_FIELDS
from search.loop.space import Space
from search.loop.surrogate.process import Array
from search.probe.evidence import FROM_CACHE, HURRIED, STOPPED_EARLY

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
# (tests/benchmarks/second_compile.py, torch 2.14, 2026-11-26).
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
    """What settings that differ in `axes` and the batch share whose graphs have most kernels in
    common, in whatever compile mode: an optimizer steps outside of them but for adamw-8bit, and a
    dynamic graph is of any batch."""
    others = (axis for axis in axes if axis not in ("optimizer", "accumulate", "compile"))
    _, options, updates = compilation_of(setting)
    batch = setting.batch_size
    compiles = setting.compile != "off"
    return (batch, compiles, options, updates, *(getattr(setting, axis) for axis in others))


def graph_of(setting: TrainSetting, axes: Iterable[str]) -> tuple[Hashable, ...]:
    """What those share that compile the same graph."""
    return (setting.compile, *kernels_of(setting, axes))


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
        what = compilation_of(record.setting)
        if record.status == "timed_out" and record.inconclusive and record.setting.compiles:
            # It would have taken longer: a search without a better guess doubles it.
            self.compiled.setdefault(what, []).append(2 * record.probe_seconds)
        if record.status != "measured":
            return
        timed = sum(record.step_seconds)
        compiling = record.compile_seconds or 0.0
        if not any(flag.startswith((HURRIED, STOPPED_EARLY)) for flag in record.flags):
            self.timed.append(timed)
        self.startup.append(max(record.probe_seconds - timed - compiling, 0.0))
        if record.compile_seconds is None:
            return
        graph, kernels = (of(record.setting, self.axes) for of in (graph_of, kernels_of))
        if graph not in self.cached and FROM_CACHE not in record.flags:
            is_alike = kernels in self.cached and not what.tuning(self.guessed)
            first = compiling / ALIKE_SHARE if is_alike else compiling
            self.compiled.setdefault(what, []).append(first)
        self.cached |= {graph, kernels}

    def compile_seconds(self, what: Compilation) -> float:
        """The median so far of what is compiled alike; else the guess, as far off as those of what
        was compiled were, but for the seconds of autotuning: those pass on the device, and another
        mode says nothing of it."""
        if what in self.compiled:
            return median(self.compiled[what])
        if what.updates and what.mode != "off":
            only = compilation_of(TrainSetting(optimizer="adamw-8bit"))
            return sum(map(self.compile_seconds, (what._replace(updates=False), only)))
        known = [(median(found), each.guess(self.guessed)) for each, found in self.compiled.items()]
        off = [seconds / guess for seconds, guess in known if guess]
        tuning = what.tuning(self.guessed)
        return (what.guess(self.guessed) - tuning) * (median(off) if off else 1.0) + tuning

    def compiling(self) -> Array:
        """Expected seconds of the first compilation of each candidate."""
        cost = {what: self.compile_seconds(what) for what in set(self.compilations)}
        return np.array([cost[what] for what in self.compilations])

    def probing(self, log_step_seconds: Array) -> Array:
        """Expected seconds of a whole probe of each candidate, given the log of its step's."""
        start = median(self.startup) if self.startup else STARTUP_SECONDS
        timing = min([TIMED_SECONDS, *self.timed])  # at least: slow steps take longer
        steps = TIMED_STEPS * np.exp(log_step_seconds)
        return np.asarray(start + self._compiling_now() + np.maximum(timing, steps))

    def _compiling_now(self) -> Array:
        """Expected seconds of compiling each candidate, with what the caches hold by now."""
        found = self.compiling()
        for i, what in enumerate(self.compilations):
            if self.graphs[i] in self.cached:
                found[i] *= AGAIN_SHARE
            elif self.kernels[i] in self.cached:
                tuning = min(what.tuning(self.guessed), found[i])
                found[i] = tuning + ALIKE_SHARE * (found[i] - tuning)
        return found


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
