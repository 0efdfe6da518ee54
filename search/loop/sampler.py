"""What to probe next. Optuna asks, and `PlannerSampler` answers with the setting whose probe should
gain most per second: a first probe, cheap looks at what was not tried, then the expected gain."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from planner.core.schema.setting import COMPILE_MODES
from planner.core.units import format_seconds
from search.loop.space import TOLERANCE, Pick, SearchStage, Space
from search.loop.study import SpaceParams
from search.loop.surrogate.posterior import Posterior, Prediction, needs_nothing_special
from search.loop.surrogate.prior import compilation_of
from search.loop.surrogate.process import Array, Mask, Values, codes_of

# Judgements but where a source is named; tests/benchmarks/simulated_worlds.py shows what they do.
SAFE = 0.8  # the first probe must fit with this probability
LIKELY = 0.5  # a probe of the plain default must fit with this probability
CALIBRATION_BATCH = 8  # images of the first probe at most, where no rates of the device are known
# With less time than this the first probe has a batch of at most 2: with four busy programs on two
# cores a step of Swin-T took 8 to 14 s at batch 8, and its five steps took all that was left of a
# minute (torch 2.13, 2026-11-25).
HASTY_SECONDS = 90.0
FIRST_PROBE_SHARE = 0.15  # the share of the time left that the first probe may take
# The search ends where so many more probes should together gain less than its tolerance. Where
# batches ripple most (the world "cliffs"), 54 devices lost 4.6% in nine of ten without a budget, in
# 18 probes; with 1 in place of 3 they lost 8.1% in 12 (2026-11-30).
TOGETHER = 3
FEWEST = 3  # measured probes before it ends for want of gain: fewer cannot disagree with the prior
LEAST_GAIN = 0.1  # the share of the tolerance that these probes must promise
INFEASIBLE = 1e-3  # a setting that fits with less than this probability is ruled out
# The penalty on the log of the rate, per log of its seconds, of a first probe and of one that no
# gain makes due: one that takes six times as long must promise a rate 20% higher. From 0.02 to 0.1
# little changes in the first probes that are chosen over a CPU's table and over predictions for
# three GPUs.
FIRST_COST = 0.1
# After so many failures and no measurement, the next probe needs nothing that a machine may lack.
MAX_FAILURES = 2
# The largest share of the time left that an eager probe of another precision may take, since that
# may be several times as fast. A probe of another attention may take this share of what the next
# probe would leave.
LOOK_SHARE = 0.08
MODE_SHARE = 0.4  # the share of all time that a probe may take which no gain makes due
GIVE_UP_SHARE = 0.7  # a probe that surely stays under this share of the best rate cannot win
NEARLY = 0.8  # of the fastest eager rate: a precision that has it may win with another attention
FAR_MORE = 2.0  # times the gain: what promises so much is probed while there is time for it
# A value is tried once more only where that promises so many times the best rate. With 1.05 to 1.25
# searches of hot devices lost 13.5% in nine of ten, because a compile mode that fails was tried
# twice; with 1.5 they lost 5.5% (27 devices of the world "heat", 2026-11-30).
MUCH_BETTER = 1.5
PLAIN_PROBES, PLAIN_KEPT = 4, 1.5  # of the plain default: at most so many, time for mostly one
PLAIN_SHARE = 0.15  # the share of all time that is kept at most to measure the plain default
MEMORY_LEVERS, SURE_TO_FIT = ("checkpointing", "offload"), 0.99
BRANCHES = ("compile", "attention", "checkpointing", "precision")  # that one probe may close


@dataclass(frozen=True)
class Outlook:
    """What a probe of each candidate promises, and the `seconds` that it takes. Only the `allowed`
    ones may be probed, within `room` seconds all together."""

    predicted: Prediction
    allowed: Mask
    seconds: Array
    room: float

    @property
    def safe(self) -> Mask:
        """The candidates that may be probed and surely fit."""
        return np.asarray(self.allowed & (self.predicted.fits >= SAFE))

    def worth(self, cost: float = 0.0) -> Array:
        """The log of each rate, lower where the setting may not run, and by `cost` where its probe
        takes longer."""
        runs = np.log(np.maximum(self.predicted.runs, 1e-9))
        return np.asarray(self.predicted.log_rate + runs - cost * np.log(self.seconds))


class PlannerSampler(BaseSampler):
    """A prior, corrected by each probe, and the expected gain of one more.

    The first probe is the fastest setting that should fit, or where no rates of the device are
    known a small and eager one: it calibrates memory and time. Each further probe is the one with
    the highest expected improvement per second of probing, which approaches the memory limit step
    by step, after cheap looks at each precision and attention. The search ends when the next probes
    (`TOGETHER`) are expected to gain less than `tolerance` together. Of the time, what a probe of
    the plain default (`plain_arm`) takes is kept to the end. A disturbed setting stays open, and
    may be probed once more.

    `seconds_left` returns the time left, None for no limit. Whoever runs the study tells the
    posterior of each record, and asks for the `upcoming` pick.
    """

    def __init__(
        self, posterior: Posterior, params: SpaceParams, tolerance: float = TOLERANCE,
        plain_arm: str | None = None, seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.posterior, self.space, self.params = posterior, posterior.space, params
        self.tolerance, self.seconds_left = tolerance, seconds_left
        self.values = {axis: _axis_values(self.space, axis) for axis in BRANCHES}
        self.plain = posterior.arms == plain_arm
        self.twins = np.array([self._twin(i) for i in range(len(self.space))], dtype=np.intp)
        self.graphs = codes_of(posterior.costs.graphs)
        self.plain_asked: set[str] = set()
        self.budget_seconds = 0.0  # the most that was ever left; 0 without a limit
        self.upcoming: Pick | None = None
        self.stopped_because = ""

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.params.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the upcoming pick; none where there is nothing to probe any more."""
        return {} if self.upcoming is None else self.params.of(self.upcoming.candidate)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:  # fmt: skip
        raise optuna.TrialPruned(self.stopped_because)

    def choose(self, busy: Collection[str] = ()) -> Pick | None:
        """The next probe, of no setting whose id is in `busy`; None where there is none, and
        `stopped_because` says why."""
        predicted, limit = self.posterior.predict(), self.seconds_left()
        self.budget_seconds = max(self.budget_seconds, limit or 0.0)
        left = np.inf if limit is None else limit
        seconds = self.posterior.probe_seconds(predicted)
        is_busy = np.array([c.id in busy for c in self.space.candidates])
        allowed = ~predicted.excluded & ~is_busy & (predicted.fits > INFEASIBLE)
        if self.posterior.time_is_guessed:  # an estimate says it of each setting, and better
            allowed &= ~self._is_needless(predicted)
        has_measured, reserve = self.posterior.best() is not None, 0.0
        plain = self._plain_default(predicted, allowed)
        if plain is not None and has_measured:
            reserve = min(PLAIN_KEPT * float(seconds[plain]), PLAIN_SHARE * self.budget_seconds)
        if pick := self._pick_searched(Outlook(predicted, allowed, seconds, left - reserve)):
            return pick
        plain = self._plain_default(predicted, allowed & (seconds <= left))
        if plain is None or not has_measured:
            return None
        self.plain_asked.add(self.space.candidates[plain].id)
        return self._make_pick(plain, predicted, "baseline")

    def _pick_searched(self, outlook: Outlook) -> Pick | None:
        """The next probe of the search itself, the plain default's aside."""
        allowed, seconds = outlook.allowed, outlook.seconds
        affordable = replace(outlook, allowed=allowed & (seconds <= outlook.room))
        if not allowed.any():
            self.stopped_because = "every candidate is probed or ruled out"
            return None
        if not affordable.allowed.any():
            quickest = format_seconds(float(seconds[allowed].min()))
            self.stopped_because = (
                f"the budget ends before another probe could (the quickest takes about {quickest})"
            )
            return None
        best = self.posterior.best()
        if best is None:
            return self._pick_first(affordable)
        pick = self._pick_next(affordable, *best)
        if pick is None:
            self.stopped_because = f"another probe would gain under {self.tolerance:.1%}"
            gains = self.posterior.improvement(outlook.predicted, allowed, best[1])
            if gains.max() >= self.tolerance:
                self.stopped_because = "what could gain more takes longer than the budget has left"
        return pick

    def _pick_first(self, outlook: Outlook) -> Pick | None:
        """The fastest that is safe, compilation counted; where none is, the likeliest to fit."""
        predicted, seconds, room = outlook.predicted, outlook.seconds, outlook.room
        safe = outlook.safe & (predicted.runs >= predicted.runs[outlook.allowed].max() / 2)
        if not safe.any():
            likely = np.round(predicted.fits, 6) - 1e-9 * np.log(self.posterior.bytes.prior)
            return self._make_pick(_argmax(likely, outlook.allowed), predicted, "calibrate")
        failed = [r.status in ("unsupported", "crashed") for r in self.posterior.history]
        wishes: list[Any] = []  # masks; each narrows the choice, unless it leaves nothing
        if sum(failed) >= MAX_FAILURES:
            wishes.append([needs_nothing_special(c.setting) for c in self.space.candidates])
        if self.posterior.time_is_guessed:
            # Nobody knows what a step takes here: a small batch without a compiler says it soonest.
            largest = CALIBRATION_BATCH if room > HASTY_SECONDS else 2
            wishes += [self.values["compile"] == "off", self.posterior.batch <= largest]
            if room <= HASTY_SECONDS:
                wishes.insert(0, self.plain)
        if room < np.inf:
            # Where even the quickest takes longer, no other is to: a compiled one would end it all.
            wishes.append(seconds <= max(FIRST_PROBE_SHARE * room, seconds[safe].min()))
        for wish in map(np.array, wishes):
            safe = safe & wish if (safe & wish).any() else safe
        return self._make_pick(_argmax(outlook.worth(FIRST_COST), safe), predicted, "calibrate")

    def _pick_next(self, outlook: Outlook, best: int, best_rate: float) -> Pick | None:
        """The first look that is due, else the highest gain per second, or by far the highest one
        while there is time for it; None where the next ones together gain too little."""
        predicted, seconds = outlook.predicted, outlook.seconds
        gains = self.posterior.improvement(predicted, outlook.allowed, best_rate)
        num_measured = sum(r.status == "measured" for r in self.posterior.history)
        if num_measured >= FEWEST:
            goes_on = self._gain_together(gains) >= self.tolerance
            gains = np.where(goes_on & (gains >= self.tolerance / TOGETHER), gains, 0.0)
        if gains.max() < LEAST_GAIN * self.tolerance:
            return None
        index, most = (_argmax(g, outlook.allowed) for g in (gains / seconds, gains))
        if seconds[most] > outlook.room - seconds[index] and gains[most] > FAR_MORE * gains[index]:
            index = most
        looks = self._looks(outlook, best, best_rate, outlook.room - seconds[index])
        return self._make_pick(next(looks, index), predicted, "search", best_rate)

    def _gain_together(self, gains: Array) -> float:
        """What the best next probes, each of another compiled graph, should gain together."""
        best = np.zeros(len(gains))
        np.maximum.at(best, self.graphs, gains)
        return float(np.sort(best)[-TOGETHER:].sum())

    def _looks(self, outlook: Outlook, best: int, best_rate: float, left: float) -> Iterator[int]:
        """Probes that are due before the one of the highest gains, which would leave `left`
        seconds: a cheap eager step of each precision and attention; a second try of what one
        unlucky probe has closed; and what the fastest eager setting becomes under a compiler."""
        predicted, seconds, modes = outlook.predicted, outlook.seconds, self.values["compile"]
        tried = self.posterior.records.keys()
        known = [i for i in tried - self.posterior.near_limit if predicted.excluded[i]]
        looks = [(self._other_precision(known), outlook.room)]
        looks += [(look, left) for look in self._each_attention(known, best)]
        for look, time in looks:
            cheap = look & outlook.safe & (seconds <= min(LOOK_SHARE * time, left))
            if cheap.any():
                yield _argmax(outlook.worth(), cheap)
        worth = outlook.worth(FIRST_COST)  # a batch nearly as fast shows it sooner
        sure = outlook.safe & (seconds <= min(MODE_SHARE * self.budget_seconds or np.inf, left))
        better = sure & (predicted.log_rate > np.log(MUCH_BETTER * best_rate))
        is_mode_left = (better & ~np.isin(modes, modes[list(tried)])).any()
        branches = [branch & better for branch in self._unlucky_branches(is_mode_left)]
        for branch in (*branches, self._never_compiled(best_rate) & sure):
            if branch.any():
                yield _argmax(worth, branch)

    def _other_precision(self, known: Sequence[int]) -> Mask:
        """The eager settings in another precision than the first probe's, which the device may
        emulate, and with its attention, so that the difference is the precision's; none once one in
        another precision ran, or enough failed."""
        precisions, ran = self.values["precision"], self.posterior.contenders()
        first, attentions = next(iter(ran)), self.values["attention"]
        other = np.asarray(precisions != precisions[first])
        has_run = any(other[i] for i in ran if i in known)
        is_done = has_run or other[list(self.posterior.records)].sum() >= MAX_FAILURES
        other = other & (attentions == attentions[first])
        return np.asarray(other & (self.values["compile"] == "off") & (not is_done))

    def _each_attention(self, known: Sequence[int], best: int) -> Iterator[Mask]:
        """The eager settings with each attention that is not known yet in the best one's precision,
        and in each whose eager step is nearly as fast as the fastest."""
        precisions, attentions = self.values["precision"], self.values["attention"]
        rates = self._eager_rates()
        least = NEARLY * max(rates.values(), default=0.0)
        fast = [best, *(i for i, rate in rates.items() if rate >= least)]
        for precision, attention in product(dict.fromkeys(precisions[fast]), np.unique(attentions)):
            look = (precisions == precision) & (attentions == attention)
            look = look & (self.values["compile"] == "off")
            if not look[known].any():
                yield look

    def _eager_rates(self) -> dict[int, float]:
        """Images/s of each eager setting that ran, by index."""
        modes = self.values["compile"]
        return {i: c.rate for i, c in self.posterior.contenders().items() if modes[i] == "off"}

    def _twin(self, index: int) -> int:
        """The index of the same setting without what buys memory for time, and nothing else; its
        own where the space has none."""
        setting = self.space.candidates[index].setting
        twin = self.space.index(setting.model_copy(update=dict.fromkeys(MEMORY_LEVERS, "none")))
        return index if twin is None else twin

    def _is_needless(self, predicted: Prediction) -> Mask:
        """Whether a setting does all the work of a twin that surely fits, and some of it twice. A
        twin that failed for another reason than memory does not count."""
        usable = ~predicted.excluded
        usable[list(self.posterior.contenders())] = True
        good = usable & (predicted.fits >= SURE_TO_FIT)
        return np.asarray(good[self.twins] & (self.twins != np.arange(len(self.twins))))

    def _never_compiled(self, best_rate: float) -> Mask:
        """The compiled settings in the precision and attention of the fastest eager one, where
        others were compiled and these never: a compiler may gain more of one precision than of
        another."""
        compiled, rates = self.values["compile"] != "off", self._eager_rates()
        fastest = max(rates, key=rates.__getitem__, default=None)
        were_others = compiled[list(self.posterior.contenders())].any()
        if fastest is None or rates[fastest] < GIVE_UP_SHARE * best_rate or not were_others:
            return np.zeros_like(compiled)
        for axis in ("precision", "attention"):
            compiled = compiled & (self.values[axis] == self.values[axis][fastest])
        return np.asarray(compiled & ~compiled[list(self.posterior.records)].any())

    def _unlucky_branches(self, is_mode_left: bool) -> Iterator[Mask]:
        """For each value of an axis that was probed once, without luck: its smaller batches. That
        probe failed, or it was so close to the limit that memory was given back and asked for
        again. No compile mode is tried again while another is left that should be as good."""
        ran, tried = self.posterior.contenders(), list(self.posterior.records)
        for axis, values in self.values.items():
            if axis == "compile" and is_mode_left:
                continue
            for value in np.unique(values[tried]):
                first, *others = [i for i in tried if values[i] == value]
                if not others and (first not in ran or first in self.posterior.near_limit):
                    smaller = self.posterior.batch <= self.posterior.batch[first] / 2
                    yield np.asarray((values == value) & smaller)

    def _plain_default(self, predicted: Prediction, allowed: Mask) -> int | None:
        """The batch of the plain default that should be its fastest; None where none is expected to
        be faster than one that ran, or enough were asked for."""
        rates = [c.rate for i, c in self.posterior.contenders().items() if self.plain[i]]
        batches = self.plain & allowed
        likely = batches & (predicted.fits >= LIKELY)
        if rates:
            likely &= predicted.log_rate > np.log(max(rates) * (1 + self.tolerance))
        elif not likely.any() and batches.any():
            return int(np.flatnonzero(batches)[0])
        if len(self.plain_asked) >= PLAIN_PROBES or not likely.any():
            return None
        return _argmax(predicted.log_rate, likely)

    @property
    def plain_is_at_its_best(self) -> bool:
        """Whether the plain default ran, and no other batch of it is expected to be faster."""
        predicted = self.posterior.predict()
        has_run = any(self.plain[i] for i in self.posterior.contenders())
        return has_run and self._plain_default(predicted, ~predicted.excluded) is None

    def untried_modes(self) -> dict[str, float]:
        """The compile modes that no probe had, with the seconds that each takes; none where nothing
        that was compiled ran, or no setting did."""
        told = self.posterior.history
        compiled = {r.status for r in told if r.setting.compile != "off"}
        if (compiled and "measured" not in compiled) or not self.posterior.contenders():
            return {}
        tried = {"off", *(r.setting.compile for r in told)}
        firsts = {c.setting.compile: c.setting for c in reversed(self.space.candidates)}
        return {
            mode: self.posterior.costs.compile_seconds(compilation_of(firsts[mode]))
            for mode in COMPILE_MODES
            if mode in firsts and mode not in tried
        }

    def _make_pick(
        self, index: int, predicted: Prediction, stage: SearchStage, best_rate: float | None = None
    ) -> Pick:
        candidate = self.space.candidates[index]
        if index in self.posterior.records and stage == "search":  # it was disturbed
            stage = "repeat"
        give_up = best_rate * GIVE_UP_SHARE if best_rate else None
        return Pick(candidate, stage, float(np.exp(predicted.log_rate[index])), give_up)


def _axis_values(space: Space, axis: str) -> Values:
    return np.array([getattr(c.setting, axis) for c in space.candidates])


def _argmax(values: Array, allowed: Mask) -> int:
    return int(np.argmax(np.where(allowed, values, -np.inf)))
