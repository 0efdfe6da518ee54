"""What a probe costs to start, to compile, to time: a guess, then as the probes so far took."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import numpy as np

from planner.schema import MeasurementRecord
from search.space import Space
from search.surrogate.arrays import Array

STARTUP_SECONDS = 5.0  # before the first probe says better: python, torch, building the model
TIMED_SECONDS = 5.0
TIMED_STEPS = 5
NUM_BLOCKS = 12  # Swin-T's
# Orders of magnitude in which Swin-T compiles; part of it whatever the number of blocks.
COMPILE_SECONDS = {
    "off": 0.0,
    "default": 40.0,
    "reduce-overhead": 45.0,
    "max-autotune": 40.0,
    "max-autotune-no-cudagraphs": 40.0,
}
# Autotuning takes besides about 1.3 s for each matmul of another shape: an assumption between what
# is reported of single ones (0.6 to 1.1 s for 20 choices once the compilers are warm; 5.2 s in
# pytorch/pytorch#107983; 9.6 s the first, vllm-project/vllm@c85b49b docs/design/torch_compile.md).
# Four stages of a Swin have 60 shapes of matmuls in a step (derived: qkv, proj and two of the MLP
# in each, three reductions between them and the head, each forward and twice backward), however
# many blocks.
AUTOTUNE_SECONDS = 60 * 1.3
# Measured: 27, 28 and 91 s for native Swins of 2, 4 and 12 blocks (fp32, default mode, two cores
# of an AMD EPYC, torch 2.13, 2026-11-20). On a GPU's host nothing was measured.
COMPILE_SLOWDOWN = {"cuda": 1.0, "cpu": 2.3}
COMPILE_FIXED_SHARE = 0.15


class ProbeCosts:
    """Expected seconds of a probe of every candidate. `compile_seconds` is a guess by mode."""

    def __init__(self, space: Space, compile_seconds: Mapping[str, float]) -> None:
        self.space = space
        self.guessed = compile_seconds
        self.startup: list[float] = []
        self.timed: list[float] = []
        self.compiled: dict[str, list[float]] = {}

    def observe(self, record: MeasurementRecord) -> None:
        """Learns from a probe that was measured, or that ended early for no fault of its own."""
        mode = record.setting.compile
        if record.status == "timed_out" and record.inconclusive and mode != "off":
            # It would have taken longer: a search without a better guess doubles it.
            self.compiled.setdefault(mode, []).append(2 * record.probe_seconds)
        if record.status != "measured":
            return
        timed = sum(record.step_seconds)
        compiling = record.compile_seconds or 0.0
        self.timed.append(timed)
        self.startup.append(max(record.probe_seconds - timed - compiling, 0.0))
        if record.compile_seconds is not None:
            self.compiled.setdefault(mode, []).append(compiling)

    def compile_seconds(self, mode: str) -> float:
        """The median of a mode so far; else its guess, as far off as the other modes' were, but for
        the seconds of autotuning: those pass on the device, and another mode says nothing of it."""
        known = self.compiled.get(mode)
        if known:
            return median(known)
        off = [median(s) / self.guessed[m] for m, s in self.compiled.items() if self.guessed[m]]
        tuning = self._autotuning(mode)
        return (self.guessed[mode] - tuning) * (median(off) if off else 1.0) + tuning

    def _autotuning(self, mode: str) -> float:
        """What a mode is guessed to take longer than the default one, where it autotunes."""
        if not mode.startswith("max-autotune"):
            return 0.0
        return max(self.guessed[mode] - self.guessed.get("default", 0.0), 0.0)

    def compiling(self) -> Array:
        """Expected seconds of compilation of each candidate."""
        modes = {c.setting.compile for c in self.space.candidates}
        cost = {mode: self.compile_seconds(mode) for mode in modes}
        return np.array([cost[c.setting.compile] for c in self.space.candidates])

    def probing(self, log_step_seconds: Array) -> Array:
        """Expected seconds of a whole probe of each candidate, given the log of its step's."""
        start = median(self.startup) if self.startup else STARTUP_SECONDS
        timing = median(self.timed) if self.timed else TIMED_SECONDS
        steps = TIMED_STEPS * np.exp(log_step_seconds)
        return np.asarray(start + self.compiling() + np.maximum(timing, steps))


def guess_compile_seconds(
    device_kind: str = "cuda", num_blocks: int = NUM_BLOCKS
) -> dict[str, float]:
    """Seconds that compiling a step of a model of so many blocks takes, by mode."""
    blocks = COMPILE_FIXED_SHARE + (1 - COMPILE_FIXED_SHARE) * num_blocks / NUM_BLOCKS
    slowdown = COMPILE_SLOWDOWN[device_kind]
    guesses = {mode: seconds * slowdown * blocks for mode, seconds in COMPILE_SECONDS.items()}
    tuned = {m: s + slowdown * AUTOTUNE_SECONDS for m, s in guesses.items() if "autotune" in m}
    return guesses | tuned
