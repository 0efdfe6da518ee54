"""What the probes say of every candidate so far: its seconds, its memory, whether it fits, what a
probe of it costs, and what fails together.

A setting fails because something that it shares with others is broken (the compiler, a compile
mode, a mode with checkpointing, an optimizer's implementation, another lever), or its arm is, or it
alone. Each of these is broken with a small probability beforehand; a probe that ran clears all that
it used, and each that failed needs a cause. A precision or an attention is blamed last, as a device
that was said to have it mostly runs it.
"""

from dataclasses import dataclass, replace
from itertools import combinations
from math import erf, exp, hypot, inf, log, prod, sqrt

import numpy as np

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import Expected, Range
from planner.core.schema.setting import COMPILED_FIELDS
from search.loop.space import Candidate, Space
from search.loop.surrogate.prior import GUESSED_SECONDS, Prior, ProbeCosts
from search.loop.surrogate.process import Array, GaussianProcess, Mask
from search.probe.evidence import Contender, is_feasible, median_interval, slowed_by, usual_cause

# Between processes the same setting repeats to about a percent, whatever the samples of one say:
# an assumption. On a shared CPU three repeats had a standard deviation of 2.2% (the median of
# sixteen settings, tests/truth/cpu_grid_2026-11-20.jsonl); of a GPU there are none yet.
REPEAT_SD = 0.01
# The share of the memory budget from which on the allocator may give memory back and ask for it
# again. That slows a step, so that a probe there says little of the others. Assumptions.
CLOSE, CLOSE_SD = 0.96, 0.2
# A probe that is slower than expected by more standard deviations than this has more noise than its
# samples show: a judgement.
SURPRISE = 3.0
MEMORY_SD = 0.005
BROKEN = 0.1  # what runs with less than this probability is not probed
# The bound until a probe has run. Without one, a model that always gives NaN took 272 probes, one
# of each arm. With it that took 23, and the only setting of many that runs is found as soon.
SURELY_BROKEN = 1e-6
OVER_BY = 0.5  # standard deviations by which a probe that ran out needs more: a judgement
NORMAL_95 = 1.96  # standard deviations to either side that hold 95% of a normal variable
LARGEST_LOG = 80.0  # e^80 is more than any rate or size, and is still a number
_erf = np.frompyfunc(erf, 1, 1)


@dataclass(frozen=True)
class Prediction:
    """What is expected of every candidate, by index: log means with standard deviations; `fits`,
    the probability that it stays in the budget; `runs`, that it runs at all; `excluded`, whether no
    probe is spent on it any more; `log_rate`, the log mean of images/s."""

    log_seconds: Array
    log_seconds_sd: Array
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
        self.log_images = np.log([c.setting.images_per_device_step * 1.0 for c in space.candidates])
        guesses = prior.guesses
        self.seconds = GaussianProcess(space, prior.seconds_scales, (g.seconds for g in guesses))
        self.bytes = GaussianProcess(space, prior.bytes_scales, (g.num_bytes or 1 for g in guesses))
        self.costs = ProbeCosts(space, prior.compile_seconds)
        self.batch = np.array([c.setting.batch_size for c in space.candidates])
        self.arms = np.array([c.arm for c in space.candidates])
        self.settled = np.zeros(len(space), dtype=bool)  # it or its arm failed, or needs too much
        self.proven = np.zeros(len(space), dtype=bool)  # a batch as large ran within the budget
        self.broken_parts = BrokenParts(space)
        self.near_limit: set[int] = set()  # what was slow so close to the limit that it says little
        self.records: dict[int, list[MeasurementRecord]] = {}
        self.history: list[MeasurementRecord] = []

    @property
    def time_is_guessed(self) -> bool:
        """Whether nobody knows the device's rates."""
        return self.prior.seconds_scales == GUESSED_SECONDS

    @property
    def excluded(self) -> Mask:
        """The candidates that no probe is spent on any more: those that failed or are known, and
        those that share too much with the failures. A disturbed one is known after a second probe,
        or where the device usually runs so."""
        known, usual = self.settled.copy(), ("", self.seconds.usual_cause)
        clear = [i for i, r in self.records.items() if len(r) > 1 or slowed_by(r[0]) in usual]
        known[clear] = True
        least = BROKEN if self.seconds.indices else SURELY_BROKEN
        return np.asarray(known | (self.broken_parts.probabilities() < least))

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        """Learns from a probe of this space, however it ended. Ignores a record that it knows."""
        index = self.space.index(candidate.setting)
        if index is None or any(record is known for known in self.history):
            return
        self.history.append(record)
        self.costs.observe(record)
        if record.inconclusive:
            return
        self.records.setdefault(index, []).append(record)
        if record.status == "measured":
            self._learn_measured(index, record)
        elif record.status in ("out_of_memory", "timed_out"):
            self._settle_larger(index)
        else:
            self.broken_parts.blame(index)
            self.settled[index] = True
            self.settled |= self._same_arm(index) & (record.status != "crashed")
        if record.status == "out_of_memory":
            self._learn_out_of_memory(index, record)
        self.seconds.usual_cause = usual_cause(r for rs in self.records.values() for r in rs)

    def _learn_measured(self, index: int, record: MeasurementRecord) -> None:
        self.broken_parts.clear(index)
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
                self.near_limit.add(index)
        self.seconds.observe(index, seconds, spread, slowed)
        if not (num_bytes := record.used_bytes):
            return
        self.bytes.observe(index, log(num_bytes), MEMORY_SD)
        if self.budget_bytes is None or num_bytes <= self.budget_bytes:
            self.proven |= self._same_arm(index) & (self.batch <= self.batch[index])
        else:
            self._settle_larger(index)

    def _same_arm(self, index: int) -> Mask:
        return np.asarray(self.arms == self.arms[index])

    def _settle_larger(self, index: int) -> None:
        """This batch and all larger ones of its arm do not fit."""
        self.settled |= self._same_arm(index) & (self.batch >= self.batch[index])

    def _learn_out_of_memory(self, index: int, record: MeasurementRecord) -> None:
        """What it needs is only bounded from below: by the budget, and by what was believed."""
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

    def contenders(self) -> dict[int, Contender]:
        """The candidates that ran and fit, by index, in the order of their first probes; on a hot
        device with what heat did to each probe."""
        contenders = {
            i: Contender(records[0].setting, tuple(records))
            for i, records in self.records.items()
            if all(is_feasible(record, self.budget_bytes) for record in records)
        }
        if contenders and self.seconds.usual_cause == "heat":
            slower, probed = self.seconds.slowness("heat")[0][:-1], np.array(self.seconds.indices)
            for i, c in contenders.items():
                contenders[i] = replace(c, slower=tuple(np.exp(slower[probed == i]).tolist()))
        return contenders

    def best(self) -> tuple[int, float] | None:
        """(index, images/s) of the fastest measured candidate that stays in the budget."""
        rates = [(i, c.rate) for i, c in self.contenders().items()]
        return max(rates, key=lambda entry: entry[1], default=None)

    def expected(self, candidate: Candidate, stage: str) -> Expected | None:
        """What is expected of a probe of `candidate` now; None for a setting outside the space."""
        index = self.space.index(candidate.setting)
        if index is None:
            return None
        predicted = self.predict()
        slower, slower_sd = self.seconds.slowness(self.seconds.usual_cause)
        log_rate = float(self.log_images[index] - predicted.log_seconds[index] - slower[-1])
        seconds_sd = hypot(predicted.log_seconds_sd[index], slower_sd, REPEAT_SD)
        log_bytes, bytes_sd = self.bytes.predict(np.array([index]))
        return Expected(
            stage=stage,
            basis="probes" if self.records else "prior",
            images_per_second=log_normal(log_rate, seconds_sd),
            used_bytes=log_normal(float(log_bytes[0]), hypot(bytes_sd[0], MEMORY_SD)),
            fits=None if self.budget_bytes is None else round(float(predicted.fits[index]), 4),
        )

    @property
    def least_bytes(self) -> int:
        """The bytes that the smallest candidate should need."""
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


# How probable it is that each is broken on a machine, before anything is known: judgements. What
# matters is their order: a mode is more often broken than the whole compiler, a shared part more
# often than one arm, an arm more often than one batch of it.
COMPILER = 0.03
MODE = 0.1
CHECKPOINTING_COMPILED = 0.1
CHECKPOINTING_IN_MODE = 0.03
OPTIMIZER = 0.05
LEVER = 0.05
NUMERIC = 0.01  # a precision (but fp8, which another package runs), or an attention
ARM = 0.03
ALONE = 0.01
MOST_CAUSES = 3  # that are looked for at once: each mode may be broken, and a precision
SURE = 0.8  # so probable a cause explains its failures, and others are looked for: a judgement
# The fields that need a part of torch, or of another package, which other settings do without.
_NEEDY = ("offload", *COMPILED_FIELDS, "optimizer_in_backward", "offload_optimizer", "parallelism")
_LEVERS = {field: TrainSetting.model_fields[field].default for field in _NEEDY}


def shared_parts(setting: TrainSetting) -> dict[str, float]:
    """The parts that a setting uses and others too, with how probably each is broken."""
    mode = setting.compile
    parts = {setting.precision: NUMERIC, f"attention {setting.attention}": NUMERIC}
    if setting.compiles:
        parts["the compiler"] = COMPILER
    if mode != "off":
        parts[f"compile {mode}"] = MODE
    if setting.checkpointing != "none":
        if mode != "off":
            parts["compiled checkpointing"] = CHECKPOINTING_COMPILED
        parts[f"checkpointing in {mode}"] = CHECKPOINTING_IN_MODE
    if setting.optimizer_implementation != "foreach":
        parts[setting.optimizer] = OPTIMIZER
    return parts | dict.fromkeys(_levers(setting), LEVER)


def _levers(setting: TrainSetting) -> list[str]:
    """The names of the levers of a setting that need something which others do without."""
    used = [lever for lever, plain in _LEVERS.items() if getattr(setting, lever) != plain]
    names = [f"{lever} {getattr(setting, lever)}" for lever in used]
    return [*names, "fp8"] if setting.precision == "fp8" else names


class BrokenParts:
    """How probably every candidate runs, judged by those that ran and those that failed."""

    def __init__(self, space: Space) -> None:
        names: dict[str, int] = {}
        self.arms = np.array([names.setdefault(c.arm, len(names)) for c in space.candidates])
        firsts = {c.arm: c.setting for c in reversed(space.candidates)}
        self.parts = [shared_parts(firsts[arm]) for arm in names]
        self.failed: dict[int, int] = {}  # by arm: how many of its candidates failed
        self.cleared: set[str] = set()
        self.cleared_arms: set[int] = set()

    def clear(self, index: int) -> None:
        """Candidate `index` ran: nothing that it uses is broken."""
        arm = int(self.arms[index])
        self.cleared.update(self.parts[arm])
        self.cleared_arms.add(arm)

    def blame(self, index: int) -> None:
        """Candidate `index` failed for another reason than memory or time."""
        arm = int(self.arms[index])
        self.failed[arm] = self.failed.get(arm, 0) + 1

    def probabilities(self) -> Array:
        """The probability that each candidate runs; 1 where no failure says anything of it."""
        broken = self._broken_probabilities()
        runs = np.ones(len(self.parts))
        for arm, parts in enumerate(self.parts):
            sound = max(0.0, 1.0 - sum(broken.get(part, 0.0) for part in parts))
            # How probably the rest of an arm runs that failed, if for no part's sake.
            rest = 1 - self._arm_broken(arm) / self._fails_alone(arm) if arm in self.failed else 1.0
            runs[arm] = sound * rest
        return np.asarray(runs[self.arms])

    def _broken_probabilities(self) -> dict[str, float]:
        """Bayes' rule, up to three causes at once: how probably each part is broken. Failures that
        a surely broken part explains are taken away, and the next causes are looked for."""
        left = {arm: self._suspects(arm) for arm in self.failed}
        broken: dict[str, float] = {}
        while left:
            shares = {part: share for suspects in left.values() for part, share in suspects.items()}
            weights = {
                causes: prod(shares[part] for part in causes)
                * prod(self._fails_alone(arm) for arm in left if not left[arm].keys() & set(causes))
                for number in range(MOST_CAUSES + 1)
                for causes in combinations(shares, number)
            }
            total = sum(weights.values())
            posterior = {p: sum(w for c, w in weights.items() if p in c) / total for p in shares}
            likeliest = max(posterior, key=posterior.__getitem__, default="")
            if not likeliest or posterior[likeliest] < SURE:
                return broken | posterior
            broken[likeliest] = posterior[likeliest]
            left = {arm: suspects for arm, suspects in left.items() if likeliest not in suspects}
        return broken

    def _suspects(self, arm: int) -> dict[str, float]:
        return {p: share for p, share in self.parts[arm].items() if p not in self.cleared}

    def _arm_broken(self, arm: int) -> float:
        """How probably an arm is broken whatever its parts, before its failures."""
        return 0.0 if arm in self.cleared_arms else ARM

    def _fails_alone(self, arm: int) -> float:
        """How probably an arm fails so often for a reason of its own."""
        broken = self._arm_broken(arm)
        return broken + (1 - broken) * float(ALONE ** self.failed[arm])


def needs_nothing_special(setting: TrainSetting) -> bool:
    """Whether it needs nothing that a machine may lack: eager, and an optimizer of many kernels."""
    if setting.compiles or setting.optimizer_implementation == "fused":
        return False
    return not _levers(setting)
