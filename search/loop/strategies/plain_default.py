"""The plain default to compare with: fp32, eager, no checkpointing, the largest batch that fits."""

from __future__ import annotations

from dataclasses import replace

from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.axes import AXES
from search.loop.space import Candidate, Space
from search.loop.strategies.strategy import Choice, Situation, Strategy
from search.loop.surrogate.arrays import Array
from search.loop.surrogate.posterior import Posterior

MAX_PROBES = 4
LIKELY = 0.5
OVERRUN = 2.0  # times as long as expected a probe may take (a compilation is guessed): a judgement
PROBES_KEPT = 1.5  # that it takes: mostly one, where the first fits and the next is known not to


def plain_arm(space: Space, attention: str | None = None) -> str | None:
    """The arm of the plain default, with the attention the library has by itself (`attention`;
    eager where that is not known). None where the space was restricted to leave it out."""
    plain = [c for c in space.candidates if _is_plain(c.setting)]
    plain = [c for c in plain if _leaves_others(c.setting, space)]
    wanted = [c for c in plain if c.setting.attention in (attention, "library")]
    eager = [c for c in plain if c.setting.attention == "eager"]
    return next((c.arm for c in (*wanted, *eager, *plain)), None)


def _is_plain(setting: TrainSetting) -> bool:
    plain = (setting.precision, setting.compile, setting.checkpointing) == ("fp32", "off", "none")
    return plain and setting.optimizer_implementation != "fused"


def _leaves_others(setting: TrainSetting, space: Space) -> bool:
    """Whether every other axis of the space has its default, or the first of what was asked."""
    others = {axis: values for axis, values in space.choices.items() if axis not in AXES}
    return all(
        getattr(setting, axis) == (default if default in values else values[0])
        for axis, values in others.items()
        for default in [TrainSetting.model_fields[axis].default]
    )


def arm_candidates(space: Space, arm: str) -> list[Candidate]:
    """The candidates of an arm, smallest batch first."""
    return [c for c in space.candidates if c.arm == arm]


class PlainDefaultHunt:
    """Asks only for that arm, and once anything was measured: for the largest batch that is likely
    to fit, until no larger one is than what was measured, in at most four probes."""

    def __init__(self, posterior: Posterior, arm: str) -> None:
        self.posterior, self.space = posterior, posterior.space
        self.ladder = [i for i, c in enumerate(self.space.candidates) if c.arm == arm]
        self.place = {c.id: i for i, c in enumerate(self.space.candidates)}
        self.asked: dict[str, float] = {}  # with the seconds that each took

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.posterior.tell(candidate, record)
        if candidate.id in self.asked:
            self.asked[candidate.id] = self.asked[candidate.id] or record.probe_seconds

    def ask(self, situation: Situation) -> Choice | None:
        index = self._wanted(situation.seconds_left)
        if index is None or self.posterior.best() is None:
            return None
        wanted = self.space.candidates[index]
        if wanted.id in situation.busy:
            return None
        self.asked[wanted.id] = 0.0
        return Choice(wanted, "baseline")

    def needed_seconds(self) -> float:
        """What it would take now."""
        index = self._wanted(None)
        return 0.0 if index is None else PROBES_KEPT * float(self._probe_seconds()[index])

    def may_take(self, candidate: Candidate) -> float:
        """The seconds that a probe of any candidate may come to take."""
        return OVERRUN * float(self._probe_seconds()[self.place[candidate.id]])

    def _probe_seconds(self) -> Array:
        return self.posterior.probe_seconds(self.posterior.predict())

    def _wanted(self, seconds_left: float | None) -> int | None:
        """The rung to try, above what is known to fit: the largest that is likely to and that there
        is time for. With all the time (None), and where none fits yet, the smallest that may."""
        if len(self.asked) >= MAX_PROBES:
            return None
        predicted = self.posterior.predict()
        is_known = {*self.posterior.ran()}.intersection(self.ladder)
        above = [i for i in self.ladder if i > max(is_known, default=-1)]
        rungs = [i for i in above if not predicted.excluded[i]]
        likely = [i for i in rungs if predicted.fits[i] >= LIKELY]
        if seconds_left is not None:
            seconds = self.posterior.probe_seconds(predicted)
            likely = [i for i in likely if seconds[i] <= seconds_left]
        elif not is_known:
            likely = likely or rungs[:1]
        return likely[-1] if likely else None


class WithPlainDefault:
    """Another strategy, and `hunt` where that ends. Of a budget the hunt is left what it needs, at
    most `at_most` seconds in all; it comes before a probe that could take those too."""

    def __init__(self, strategy: Strategy, hunt: PlainDefaultHunt, at_most: float) -> None:
        self.strategy, self.hunt, self.at_most = strategy, hunt, at_most

    @property
    def stopped_because(self) -> str:
        return self.strategy.stopped_because

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.strategy.tell(candidate, record)
        self.hunt.tell(candidate, record)

    def ask(self, situation: Situation) -> Choice | None:
        left = situation.seconds_left
        if left is None:
            return self.strategy.ask(situation) or self.hunt.ask(situation)
        may_spend = max(self.at_most - sum(self.hunt.asked.values()), 0.0)
        kept = min(self.hunt.needed_seconds(), may_spend, left)
        choice = self.strategy.ask(replace(situation, seconds_left=left - kept))
        if choice and not (kept and self.hunt.may_take(choice.candidate) > left - kept):
            return choice
        plain = self.hunt.ask(replace(situation, seconds_left=kept) if choice else situation)
        return plain or choice or (self.strategy.ask(situation) if kept else None)
