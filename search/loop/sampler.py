"""What to probe next: Optuna asks, and that whose probe should gain most per second answers."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from planner.core.schema.setting import COMPILE_MODES
from planner.core.units import format_seconds
from search.loop.space import TOLERANCE, Choice, Phase, Space
from search.loop.study import SpaceParams
from search.loop.surrogate.posterior import Posterior, Prediction, is_plain
from search.loop.surrogate.prior import compilation_of
from search.loop.surrogate.process import Array, Mask, Values

# Judgements but where a source is named; tests/benchmarks/simulated_worlds.py shows what they do.
SAFE = 0.8  # the first probe must fit with this probability
LIKELY = 0.5  # and one of the plain default with this
CALIBRATION_BATCH = 8  # images of the first probe at most, where no rates of the device are known
# And one where there is so little time: with four busy programs on two cores a step of Swin-T took
# 8 to 14 s at batch 8, and its five steps all that was left of a minute (torch 2.13, 2026-11-25).
HASTY_SECONDS = 90.0
FIRST_SHARE = 0.15  # of the time left, that the first probe may be expected to take
FEWEST = 3  # measured probes before it ends for want of gain: fewer cannot disagree with the prior
LEAST_GAIN = 0.1  # of the tolerance, that those must promise
INFEASIBLE = 1e-3  # a setting that fits with less than this probability is ruled out
# What a longer first probe, or the only one of a compile mode, must promise more of rate, in logs:
# 20% more for one that takes six times as long. Of first probes chosen over a CPU's table and over
# predictions for three GPUs little changes from 0.02 to 0.1.
FIRST_COST = 0.1
# After so many failures and nothing measured, a setting that needs nothing of the machine.
MAX_FAILURES = 2
# Of the time left, that a probe of another precision or attention may take. At 0.05 an eager one
# had no room in three minutes: as drawn 3.6 and not 1.6% were lost, where bf16 is slow 23 and not
# 7% (18 simulated devices each, seeds from 300; ten minutes lose the same to a tenth).
SCOUT_SHARE = 0.08
MODE_SHARE = 0.4  # of the time given, that the only probe of a compile mode may take
LAST_CALL = 1.2  # of what it may take, that would have to be left for it by the probe before
GIVE_UP_SHARE = 0.7  # a probe that surely stays under this share of the best rate cannot win
# Times the best rate, that a value must promise to be tried once more. From 1.05 to 1.25 hot
# devices lost 13.5% in nine of ten, as a compile mode is tried twice that fails; at 1.5 they lose
# 5.5% (27 devices of the world "heat", 2026-11-30).
MUCH_BETTER = 1.5
PLAIN_PROBES, PLAIN_KEPT = 4, 1.5  # of the plain default: at most so many, time for mostly one
PLAIN_SHARE = 0.15  # of the time given, at most kept to measure what the gain is over
MEMORY_LEVERS, SURE_TO_FIT = ("checkpointing", "offload"), 0.99
BRANCHES = ("compile", "attention", "checkpointing", "precision")  # that one probe may close


class PlannerSampler(BaseSampler):
    """A prior, corrected by each probe, and the expected gain of one more.

    The first probe is the fastest setting that should fit, or where no rates of the device are
    known a small and eager one: it calibrates memory and time. Each further probe is the one with
    the highest expected improvement per second of probing, which approaches the memory limit step
    by step, after cheap looks at each precision and attention. It ends when no probe is expected to
    gain `tolerance` any more. Of the time, what a probe of the plain default takes (`plain_arm`) is
    kept to its end. What was disturbed stays open, and may be asked for once more.

    `seconds_left` says what time there is, None for no limit. Whoever runs the study tells the
    posterior of each record, and asks for the `upcoming` choice.
    """

    def __init__(
        self, posterior: Posterior, params: SpaceParams, tolerance: float = TOLERANCE,
        plain_arm: str | None = None, seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.posterior, self.space, self.params = posterior, posterior.space, params
        self.tolerance, self.seconds_left = tolerance, seconds_left
        self.values = {axis: _values(self.space, axis) for axis in BRANCHES}
        self.plain = posterior.arms == plain_arm
        self.twins = np.array([self._twin(i) for i in range(len(self.space))], dtype=np.intp)
        self.plain_asked: set[str] = set()
        self.given_seconds = 0.0
        self.upcoming: Choice | None = None
        self.stopped_because = ""

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.params.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """What was chosen, as parameters; none where there is nothing to probe any more."""
        return {} if self.upcoming is None else self.params.of(self.upcoming.candidate)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:  # fmt: skip
        raise optuna.TrialPruned(self.stopped_because)

    def choose(self, busy: Collection[str] = ()) -> Choice | None:
        """The next probe; None where there is none, and `stopped_because` says why."""
        predicted, left = self.posterior.predict(), self.seconds_left()
        self.given_seconds = max(self.given_seconds, left or 0.0)
        seconds = self.posterior.probe_seconds(predicted)
        is_busy = np.array([c.id in busy for c in self.space.candidates])
        allowed = ~predicted.excluded & ~is_busy & (predicted.fits > INFEASIBLE)
        if self.posterior.time_is_guessed:  # an estimate says it of each setting, and better
            allowed &= ~self._is_needless(predicted)
        plain = self._plain_default(predicted, seconds, allowed)
        kept = 0.0
        if plain is not None and self.posterior.best() is not None:
            kept = min(PLAIN_KEPT * float(seconds[plain]), PLAIN_SHARE * self.given_seconds)
        room = np.inf if left is None else left - kept
        found = self._choose(predicted, allowed, seconds, room)
        if found is not None:
            return found
        quick = allowed & (seconds <= (np.inf if left is None else left))
        plain = self._plain_default(predicted, seconds, quick)
        if plain is None or self.posterior.best() is None:
            return None
        self.plain_asked.add(self.space.candidates[plain].id)
        return self._choice(plain, predicted, "baseline")

    def _choose(
        self, predicted: Prediction, allowed: Mask, seconds: Array, room: float
    ) -> Choice | None:
        """The next of the search itself, within `room` seconds."""
        affordable = allowed & (seconds <= room)
        best = self.posterior.best()
        if not allowed.any():
            self.stopped_because = "every candidate is probed or ruled out"
            return None
        if not affordable.any():
            quickest = format_seconds(float(seconds[allowed].min()))
            self.stopped_because = (
                f"the budget ends before another probe could (the quickest takes about {quickest})"
            )
            return None
        if best is None:
            return self._first(predicted, affordable, seconds, room)
        found = self._next(predicted, affordable, seconds, *best, room)
        if found is None:
            self.stopped_because = f"another probe would gain under {self.tolerance:.1%}"
            beyond = self.posterior.improvement(predicted, allowed, best[1])
            if beyond.max() >= self.tolerance:
                self.stopped_because = "what could gain more takes longer than the budget has left"
        return found

    def _first(
        self, predicted: Prediction, allowed: Mask, seconds: Array, room: float
    ) -> Choice | None:
        """The fastest that is safe, compilation counted; where none is, the likeliest to fit."""
        runs = predicted.runs
        safe = allowed & (predicted.fits >= SAFE) & (runs >= runs[allowed].max() / 2)
        if not safe.any():
            likely = np.round(predicted.fits, 6) - 1e-9 * np.log(self.posterior.bytes.prior)
            return self._choice(_argmax(likely, allowed), predicted, "calibrate")
        settings = [c.setting for c in self.space.candidates]
        failed = [r.status in ("unsupported", "crashed") for r in self.posterior.told]
        wishes: list[Any] = []  # each of them where there is such a one
        if sum(failed) >= MAX_FAILURES:
            wishes.append([is_plain(s) for s in settings])
        if self.posterior.time_is_guessed:
            # Nobody knows what a step takes here: a small batch without a compiler says it soonest.
            largest = CALIBRATION_BATCH if room > HASTY_SECONDS else 2
            wishes += [self.values["compile"] == "off", self.posterior.batch <= largest]
            if room <= HASTY_SECONDS:
                wishes.insert(0, self.plain)
        if room < np.inf:
            # Where even the quickest takes longer, no other is to: a compiled one would end it all.
            wishes.append(seconds <= max(FIRST_SHARE * room, seconds[safe].min()))
        for wish in map(np.array, wishes):
            safe = safe & wish if (safe & wish).any() else safe
        worth = predicted.log_rate - FIRST_COST * np.log(seconds)
        worth += np.log(np.maximum(runs, 1e-9))
        return self._choice(_argmax(worth, safe), predicted, "calibrate")

    def _next(
        self, predicted: Prediction, allowed: Mask, seconds: Array, best: int, best_rate: float,
        room: float,
    ) -> Choice | None:  # fmt: skip
        gains = self.posterior.improvement(predicted, allowed, best_rate)
        num_measured = sum(r.status == "measured" for r in self.posterior.told)
        if num_measured >= FEWEST:
            gains = np.where(gains >= self.tolerance, gains, 0.0)  # too little to go on for
        if gains.max() < LEAST_GAIN * self.tolerance:
            return None
        index = _argmax(gains / seconds, allowed)
        looks = self._looks(predicted, allowed, seconds, best, best_rate, room - seconds[index])
        return self._choice(next(looks, index), predicted, "search", best_rate)

    def _looks(
        self, predicted: Prediction, allowed: Mask, seconds: Array, best: int, best_rate: float,
        left: float,
    ) -> Iterator[int]:  # fmt: skip
        """What shows how a device does what was not tried on it, while it is cheap: an eager step
        in another precision than the first probes', which may be emulated, and one with each
        attention in the best's. Then once more what one unlucky probe has closed; what the fastest
        eager setting becomes under a compiler; and what no later probe could show, as `left` would
        not be enough for it: a compile mode."""
        tried, ran = list(self.posterior.records), list(self.posterior.ran())
        modes, precisions = self.values["compile"], self.values["precision"]
        attentions = self.values["attention"]
        known = [i for i in tried if predicted.excluded[i] and i not in self.posterior.close]
        fits = allowed & (predicted.fits >= SAFE)
        worth = predicted.log_rate + np.log(np.maximum(predicted.runs, 1e-9))
        strange = precisions != precisions[ran[0]]
        eager = (precisions == precisions[best]) & (modes == "off")
        looks = (eager & (attentions == a) for a in np.unique(attentions))
        scouts = [look for look in looks if not look[known].any()]
        has_run = [i for i in ran if i in known]
        if not strange[has_run].any() and strange[tried].sum() < MAX_FAILURES:
            scouts.insert(0, strange & (modes == "off"))
        cheap = fits & (seconds <= SCOUT_SHARE * left)
        yield from (_argmax(worth, these & cheap) for these in scouts if (these & cheap).any())
        worth = worth - FIRST_COST * np.log(seconds)  # a batch nearly as fast shows it sooner
        sure = fits & (seconds <= min(MODE_SHARE * self.given_seconds or np.inf, left))
        better = sure & (predicted.log_rate > np.log(MUCH_BETTER * best_rate))
        untried = np.setdiff1d(modes, modes[tried])
        for these in self._closed(tried, (better & np.isin(modes, untried)).any()):
            if (these & better).any():
                yield _argmax(worth, these & better)
        compiled = self._never_compiled(best_rate) & sure
        if compiled.any():
            yield _argmax(worth, compiled)
        for mode in untried:
            at = fits & (modes == mode)
            if at.any():
                index = _argmax(worth, at)
                if left / LAST_CALL < seconds[index] <= MODE_SHARE * self.given_seconds:
                    yield index

    def _twin(self, index: int) -> int:
        """The same setting without what buys memory for time, and nothing else; itself where that
        is no other."""
        setting = self.space.candidates[index].setting
        twin = self.space.index(setting.model_copy(update=dict.fromkeys(MEMORY_LEVERS, "none")))
        return index if twin is None else twin

    def _is_needless(self, predicted: Prediction) -> Mask:
        """What does all the work of a twin that surely fits, and some of it twice. A twin that
        failed for another reason than memory does not count."""
        usable = ~predicted.excluded
        usable[list(self.posterior.ran())] = True
        good = usable & (predicted.fits >= SURE_TO_FIT)
        return np.asarray(good[self.twins] & (self.twins != np.arange(len(self.twins))))

    def _never_compiled(self, best_rate: float) -> Mask:
        """What compiles the precision and attention of the fastest eager setting, where others were
        compiled and these never: a compiler may gain more of one precision than of another."""
        modes, none = self.values["compile"], np.zeros(len(self.space), dtype=bool)
        eager = {i: c.rate for i, c in self.posterior.ran().items() if modes[i] == "off"}
        fastest = max(eager, key=lambda i: eager[i], default=None)
        if fastest is None or eager[fastest] < GIVE_UP_SHARE * best_rate:
            return none
        same = modes != "off"
        for axis in ("precision", "attention"):
            same = same & (self.values[axis] == self.values[axis][fastest])
        compiled = [i for i in self.posterior.ran() if modes[i] != "off"]
        return none if not compiled or same[list(self.posterior.records)].any() else same

    def _closed(self, tried: Sequence[int], is_mode_left: bool) -> Iterator[Mask]:
        """Of each value that was probed once, and was unlucky: its smaller batches. That probe
        failed, or it was so close to the limit that memory was given back and asked for again. No
        compile mode is tried again while there is another as good."""
        ran = self.posterior.ran()
        for axis, values in self.values.items():
            if axis == "compile" and is_mode_left:
                continue
            for value in np.unique(values[list(tried)]):
                with_it = [i for i in tried if values[i] == value]
                if len(with_it) == 1 and (
                    with_it[0] not in ran or with_it[0] in self.posterior.close
                ):
                    smaller = self.posterior.batch <= self.posterior.batch[with_it[0]] / 2
                    yield np.asarray((values == value) & smaller)

    def _plain_default(self, predicted: Prediction, seconds: Array, allowed: Mask) -> int | None:
        """The batch of the plain default that should be its fastest; None where none is expected to
        be faster than one that ran, or it was asked for often enough."""
        rates = [c.rate for i, c in self.posterior.ran().items() if self.plain[i]]
        rungs = self.plain & allowed
        likely = rungs & (predicted.fits >= LIKELY)
        if rates:
            likely &= predicted.log_rate > np.log(max(rates) * (1 + self.tolerance))
        elif not likely.any() and rungs.any():
            return int(np.flatnonzero(rungs)[0])
        if len(self.plain_asked) >= PLAIN_PROBES or not likely.any():
            return None
        return _argmax(predicted.log_rate, likely)

    @property
    def plain_is_at_its_best(self) -> bool:
        """Whether it ran, and no other batch of it is expected to be faster."""
        predicted = self.posterior.predict()
        seconds = self.posterior.probe_seconds(predicted)
        has_run = any(self.plain[i] for i in self.posterior.ran())
        return has_run and self._plain_default(predicted, seconds, ~predicted.excluded) is None

    def untried_modes(self) -> dict[str, float]:
        """The compile modes that no probe had, with the seconds that each takes; none where nothing
        that was compiled ran, or no setting did."""
        told = self.posterior.told
        compiled = {r.status for r in told if r.setting.compile != "off"}
        if (compiled and "measured" not in compiled) or not self.posterior.ran():
            return {}
        tried = {"off", *(r.setting.compile for r in told)}
        firsts = {c.setting.compile: c.setting for c in reversed(self.space.candidates)}
        costs = self.posterior.costs
        return {
            mode: costs.compile_seconds(compilation_of(firsts[mode]))
            for mode in COMPILE_MODES
            if mode in firsts and mode not in tried
        }

    def _choice(
        self, index: int, predicted: Prediction, phase: Phase, best_rate: float | None = None
    ) -> Choice:
        candidate = self.space.candidates[index]
        if index in self.posterior.records and phase == "search":  # it was disturbed
            phase = "finalists"
        give_up = best_rate * GIVE_UP_SHARE if best_rate else None
        return Choice(candidate, phase, float(np.exp(predicted.log_rate[index])), give_up)


def _values(space: Space, axis: str) -> Values:
    return np.array([getattr(c.setting, axis) for c in space.candidates])


def _argmax(values: Array, allowed: Mask) -> int:
    return int(np.argmax(np.where(allowed, values, -np.inf)))
