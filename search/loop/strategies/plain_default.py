"""The plain default to compare with: fp32, eager, no checkpointing, the largest batch that fits."""

from __future__ import annotations

from dataclasses import replace

from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.axes import AXES
from search.loop.space import Candidate, Space
from search.loop.strategies.strategy import Choice, Situation, Strategy
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
    return (
        setting.precision == "fp32"
        and setting.compile == "off"
        and setting.checkpointing == "none"
        and setting.optimizer_implementation != "fused"
    )


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
        self.posterior = posterior
        self.ladder = arm_candidates(posterior.space, arm)
        self.place = {c.id: i for i, c in enumerate(posterior.space.candidates)}
        self.asked = 0
        self.awaited = ""
        self.spent_seconds = 0.0

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.posterior.tell(candidate, record)
        if candidate.id == self.awaited:
            self.awaited = ""
            self.spent_seconds += record.probe_seconds

    def ask(self, situation: Situation) -> Choice | None:
        wanted = self._wanted(situation.seconds_left)
        if wanted is None or wanted.id in situation.busy or self.posterior.best() is None:
            return None
        self.asked += 1
        self.awaited = wanted.id
        return Choice(wanted, "baseline")

    def needed_seconds(self) -> float:
        """What it would take now."""
        wanted = self._wanted(None)
        return 0.0 if wanted is None else PROBES_KEPT * self.probe_seconds(wanted)

    def probe_seconds(self, candidate: Candidate) -> float:
        """What a probe of any candidate is expected to take."""
        seconds = self.posterior.probe_seconds(self.posterior.predict())
        return float(seconds[self.place[candidate.id]])

    def _wanted(self, seconds_left: float | None) -> Candidate | None:
        """The rung to try, above what is known to fit: the largest that is likely to and that there
        is time for. With all the time (None), and where none fits yet, the smallest that may."""
        if self.asked >= MAX_PROBES:
            return None
        predicted = self.posterior.predict()
        seconds = self.posterior.probe_seconds(predicted)
        places = [self.place[c.id] for c in self.ladder]
        ran = self.posterior.ran()
        start = max((n for n, i in enumerate(places, 1) if i in ran), default=0)
        rungs = [i for i in places[start:] if not predicted.excluded[i]]
        likely = [i for i in rungs if predicted.fits[i] >= LIKELY
                  and (seconds_left is None or seconds[i] <= seconds_left)]  # fmt: skip
        if seconds_left is None and not start:
            likely = likely or rungs[:1]
        return self.posterior.space.candidates[likely[-1]] if likely else None


class WithPlainDefault:
    """Another strategy, and `hunt` where that ends. Of a budget the hunt is left what it needs, at
    most `at_most` seconds in all; it comes before a probe that could take those too."""

    def __init__(self, strategy: Strategy, hunt: PlainDefaultHunt, at_most: float) -> None:
        self.strategy, self.hunt, self.at_most = strategy, hunt, at_most
        self.stopped_because = ""

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.strategy.tell(candidate, record)
        self.hunt.tell(candidate, record)

    def ask(self, situation: Situation) -> Choice | None:
        left, kept = situation.seconds_left, 0.0
        if left is not None:
            may_spend = max(self.at_most - self.hunt.spent_seconds, 0.0)
            kept = min(self.hunt.needed_seconds(), may_spend, left)
        choice = self._own(situation, kept)
        if choice is not None and not self._may_take(choice, left, kept):
            return choice
        own_time = situation if choice is None else replace(situation, seconds_left=kept)
        plain = self.hunt.ask(own_time)
        return plain or choice or (self._own(situation, 0.0) if kept else None)

    def _own(self, situation: Situation, kept: float) -> Choice | None:
        left = situation.seconds_left
        rest = situation if left is None else replace(situation, seconds_left=left - kept)
        choice = self.strategy.ask(rest)
        self.stopped_because = self.strategy.stopped_because
        return choice

    def _may_take(self, choice: Choice, left: float | None, kept: float) -> bool:
        """Whether a probe may come to take what is kept."""
        if left is None or not kept:
            return False
        return OVERRUN * self.hunt.probe_seconds(choice.candidate) > left - kept
