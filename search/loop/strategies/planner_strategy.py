"""The default strategy: a posterior, and the setting whose probe should gain most per second."""

from __future__ import annotations

import numpy as np

from planner.core.schema import MeasurementRecord
from planner.core.units import format_seconds
from search.loop.space import Candidate, Space
from search.loop.strategies.strategy import TOLERANCE, Choice, Phase, Situation
from search.loop.surrogate.arrays import Array, Mask, Values
from search.loop.surrogate.broken_parts import is_plain
from search.loop.surrogate.posterior import Posterior, Prediction

# Judgements but where a source is named; tests/benchmarks/strategies.py shows what they do.
SAFE = 0.8  # the first probe must fit with this probability
CALIBRATION_BATCH = 8  # images of the first probe at most, where no rates of the device are known
FIRST_SHARE = 0.15  # of the time left, that the first probe may be expected to take
FEWEST = 3  # measured probes before it ends for want of gain: fewer cannot disagree with the prior
INFEASIBLE = 1e-3  # a setting that fits with less than this probability is ruled out
# What a longer first probe, or the only one of a compile mode, must promise more of rate, in logs:
# 20% more for one that takes six times as long. Of first probes chosen over a CPU's table and over
# predictions for three GPUs (tests/benchmarks/predicted_tables.py, last in fb8f59e): little
# changes from 0.02 to 0.1. For a mode it is a judgement: without it that probe was of 64 images on
# a processor, and took six of ten minutes.
FIRST_COST = 0.1
# While there is time for so many probes as long as the next one, a gain is shared among settings
# that are alike, as several will be tried. Of 2, 3 and 4, 3 lost least in three minutes (24
# simulated devices, as they were drawn before 7638604).
ENOUGH_PROBES = 3
MAY_FIT = 0.1  # a larger batch is tried before all ends where it fits with this probability
# After so many failures and nothing measured, a setting that needs nothing of the machine.
MAX_FAILURES = 2
SCOUT_SHARE = 0.05  # of the time left, that a probe of another precision may take
MODE_SHARE = 0.4  # of the time given, that the only probe of a compile mode may take
LAST_CALL = 1.2  # of what it may take, that would have to be left for it by the probe before
GIVE_UP_SHARE = 0.7  # a probe that surely stays under this share of the best rate cannot win


class PlannerStrategy:
    """The default: a prior, corrected by each probe, and the expected gain of one more.

    The first probe is the fastest setting that should fit, or where no rates of the device are
    known a small and eager one: it calibrates memory and time. Each further probe is the one with
    the highest expected improvement per second of probing, which approaches the memory limit step
    by step; where there is no time for two more as long, each has its gain to itself. The
    search ends when no probe is expected to gain `tolerance` any more and the next larger batch of
    the best setting is known not to be better. What was disturbed stays open, and may be asked for
    once more.
    """

    def __init__(self, posterior: Posterior, tolerance: float = TOLERANCE) -> None:
        self.space, self.posterior = posterior.space, posterior
        self.tolerance = tolerance
        axes = ("compile", "precision", "attention")
        self.modes, self.precisions, self.attentions = (_values(self.space, a) for a in axes)
        self.given_seconds = 0.0
        self.stopped_because = ""

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.posterior.tell(candidate, record)

    def ask(self, situation: Situation) -> Choice | None:
        predicted, left = self.posterior.predict(), situation.seconds_left
        seconds = self.posterior.probe_seconds(predicted)
        busy = np.array([c.id in situation.busy for c in self.space.candidates])
        open_now = ~predicted.excluded & ~busy & (predicted.fits > INFEASIBLE)
        if self.posterior.time_is_guessed:  # an estimate says it of each setting, and better
            open_now &= ~self.posterior.dominated(predicted)
        affordable = open_now if left is None else open_now & (seconds <= left)
        # The first that is heard of the budget is the most of it that is ever left.
        self.given_seconds = max(self.given_seconds, left or 0.0)
        best = self.posterior.best()
        if not open_now.any():
            self.stopped_because = "every candidate is probed or ruled out"
            return None
        if not affordable.any():
            quickest = format_seconds(float(seconds[open_now].min()))
            self.stopped_because = (
                f"the budget ends before another probe could (the quickest takes about {quickest})"
            )
            return None
        if best is None:
            return self._first(predicted, affordable, seconds, left)
        choice = self._next(predicted, affordable, seconds, best, situation)
        if choice is None and not np.array_equal(open_now, affordable):
            beyond = self.posterior.improvement(predicted, open_now, best[1])
            if beyond.max() >= self.tolerance:
                self.stopped_because = "what could gain more takes longer than the budget has left"
        return choice

    def _first(
        self, predicted: Prediction, allowed: Mask, seconds: Array, left: float | None
    ) -> Choice:
        """The fastest that is safe, compilation counted; where none is, the likeliest to fit."""
        runs = predicted.runs
        safe = allowed & (predicted.fits >= SAFE) & (runs >= runs[allowed].max() / 2)
        if not safe.any():
            likely = np.round(predicted.fits, 6) - 1e-9 * np.log(self.posterior.bytes.prior)
            return self._choice(_argmax(likely, allowed), predicted, "calibrate")
        settings = [c.setting for c in self.space.candidates]
        failed = [r.status in ("unsupported", "crashed") for r in self.posterior.told]
        wishes = []  # each of them where there is such a one
        if sum(failed) >= MAX_FAILURES:
            wishes.append([is_plain(s) for s in settings])
        if left is not None:
            # Where even the quickest takes longer, no other is to: a compiled one would end it all.
            wishes.append(seconds <= max(FIRST_SHARE * left, seconds[safe].min()))
        if self.posterior.time_is_guessed:
            # Nobody knows what a step takes here: a small batch without a compiler says it soonest.
            wishes.append([s.compile == "off" for s in settings])
            wishes.append([s.batch_size <= CALIBRATION_BATCH for s in settings])
        for wish in map(np.array, wishes):
            safe = safe & wish if (safe & wish).any() else safe
        worth = predicted.log_rate - FIRST_COST * np.log(seconds) + np.log(runs)
        return self._choice(_argmax(worth, safe), predicted, "calibrate")

    def _next(
        self, predicted: Prediction, allowed: Mask, seconds: Array, found: tuple[int, float],
        situation: Situation,
    ) -> Choice | None:  # fmt: skip
        (best, best_rate), left = found, situation.seconds_left
        alone = self.posterior.improvement(predicted, allowed, best_rate)
        worth = predicted.log_rate + np.log(np.maximum(predicted.fits * predicted.runs, 1e-9))
        unheard = self._unheard(predicted, best_rate)
        num_measured = sum(r.status == "measured" for r in self.posterior.told)
        if alone.max() < self.tolerance and num_measured >= FEWEST:
            # What is recommended is known to be the end of a climb, whatever the prior says.
            arms, batch = self.posterior.arms, self.posterior.batch
            above = (arms == arms[best]) & (batch > batch[best])
            above &= np.arange(len(batch)) == above.argmax()
            for last in (above, unheard):
                last = last & allowed & (predicted.fits >= MAY_FIT)
                if last.any():
                    return self._choice(_argmax(worth, last), predicted, "search", best_rate)
            self.stopped_because = f"another probe would gain under {self.tolerance:.1%}"
            return None
        alone = np.where(alone >= self.tolerance, alone, 0.0)  # too little to go on for
        gain = self.posterior.shared_improvement(predicted, alone, best_rate)
        if not gain.any():  # too little to tell by: the highest expected rate per second of probing
            gain = alone = np.where(allowed, np.exp(worth), 0.0)
        index = _argmax(gain / seconds, allowed)
        if left is not None and ENOUGH_PROBES * seconds[index] > left:
            index = _argmax(alone / seconds, allowed)
        rest = np.inf if left is None else left - seconds[index]
        scout = self._scout(predicted, allowed, seconds, best, unheard, rest)
        return self._choice(index if scout is None else scout, predicted, "search", best_rate)

    def _scout(
        self, predicted: Prediction, allowed: Mask, seconds: Array, best: int, unheard: Mask,
        left: float,
    ) -> int | None:  # fmt: skip
        """What shows how a device does what was not tried on it, while it is cheap: an eager step
        in another precision than the first probes', which may be emulated, and one with each
        attention in the best's. Then what is `unheard`. And what no later probe could show, as
        `left` would not be enough for it: a compile mode."""
        tried, ran = list(self.posterior.records), list(self.posterior.ran())
        known = [i for i in tried if predicted.excluded[i]]  # a disturbed look is none
        sure = allowed & (predicted.fits >= SAFE)
        worth = predicted.log_rate + np.log(np.maximum(predicted.runs, 1e-9))
        modes, strange = self.modes, self.precisions != self.precisions[ran[0]]
        eager = (self.precisions == self.precisions[best]) & (modes == "off")
        looks = (eager & (self.attentions == a) for a in np.unique(self.attentions))
        scouts = [look for look in looks if not look[known].any()]
        has_run = [i for i in ran if i in known]
        if not strange[has_run].any() and strange[tried].sum() < MAX_FAILURES:
            scouts.insert(0, strange & (modes == "off"))
        cheap = sure & (seconds <= SCOUT_SHARE * left)
        for these in scouts:
            if (these & cheap).any():
                return _argmax(worth, these & cheap)
        worth -= FIRST_COST * np.log(seconds)  # a batch nearly as fast shows it as well, and sooner
        unheard = sure & unheard & (seconds <= min(MODE_SHARE * self.given_seconds, left))
        if unheard.any():
            return _argmax(worth, unheard)
        for mode in np.setdiff1d(modes, modes[tried]):
            at = sure & (modes == mode)
            if at.any():
                index = _argmax(worth, at)
                if left / LAST_CALL < seconds[index] <= MODE_SHARE * self.given_seconds:
                    return index
        return None

    def _unheard(self, predicted: Prediction, best_rate: float) -> Mask:
        """What compiles the fastest eager setting with any batch, in modes that ran, if it can win:
        it may be the fastest compiled too. Nothing where it was compiled, whatever came of it."""
        ran, tried = self.posterior.ran(), list(self.posterior.records)
        eager = [i for i in ran if self.modes[i] == "off"]
        fastest = max(eager, key=lambda i: ran[i].rate, default=0)
        unheard = self.modes != "off"
        for kind in (self.precisions, self.attentions, _values(self.space, "checkpointing")):
            unheard &= kind == kind[fastest]
        can_win = predicted.log_rate > np.log(GIVE_UP_SHARE * best_rate)
        can_win &= np.isin(self.modes, self.modes[list(ran)])
        return np.asarray(unheard & can_win & (bool(eager) and not unheard[tried].any()))

    def _choice(
        self, index: int, predicted: Prediction, phase: Phase, best_rate: float | None = None
    ) -> Choice:
        candidate = self.space.candidates[index]
        if index in self.posterior.records:  # it was disturbed
            phase = "finalists"
        give_up = best_rate * GIVE_UP_SHARE if best_rate else None
        return Choice(candidate, phase, float(np.exp(predicted.log_rate[index])), give_up)


def _values(space: Space, axis: str) -> Values:
    return np.array([getattr(c.setting, axis) for c in space.candidates])


def _argmax(values: Array, allowed: Mask) -> int:
    return int(np.argmax(np.where(allowed, values, -np.inf)))
