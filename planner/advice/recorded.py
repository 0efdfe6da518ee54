"""Estimates of many choices of a model that is recorded: a few batches of each step are, and others
lie between them while choices are compared. What is answered is recorded at its own batch."""

from __future__ import annotations

from collections.abc import Iterable

from planner.advice.estimates import Estimates
from planner.advice.wish import SAMPLE_BATCH, Choice, Wish
from planner.core.errors import UnsupportedError
from planner.core.schema import ResolvedSetting, TrainSetting
from planner.core.schema.distribution import DEEPSPEED
from planner.estimation.device_estimator import Combine, combined, combined_time, on_line
from planner.estimation.estimate import Estimate
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import Ledger
from planner.libraries.limits import batch_unit
from planner.machine.hardware import Gpu
from planner.recording import kept
from planner.throughput.prediction import StepTime

LEAST_BATCH, MOST_BATCH = 8, 128  # between which a free batch is recorded; others lie beyond
MAX_COMPILED = 4  # steps that are compiled for one answer, each some minutes
MAX_SECONDS = 900.0  # for all of them


class RecordedEstimates(Estimates):
    """As `Estimates`. `answers` turns on when choices are made: from then on nothing lies between.
    A choice that is compiled has a step only where that is recorded at its batch, or, where the
    wish lets steps be compiled, at any other."""

    def __init__(self, wish: Wish, like: RecordedEstimates | None = None) -> None:
        super().__init__(wish, like)
        # Other cards are compared by what this one asks for: their kernels' scratch differs.
        self.card: Gpu | None = like.card if like else wish.gpu
        self.answers = like is not None
        self.unrecorded: list[ResolvedSetting] = []  # whose steps were asked for
        # Of what is compiled, the batch and the parts that it was recorded at.
        self._compiled: dict[TrainSetting, tuple[int, int]] = like._compiled if like else {}

    def has_step(self, choice: Choice) -> bool:
        setting = self.resolved(choice.setting)
        if setting.compile == "off":
            first = setting if self.answers else self._points(setting)[0]
            failed = record_ledgers([(self.wish.model, first, self.card)])[0]
            if failed is not None:
                raise failed
            return True
        if setting.parallelism in DEEPSPEED:
            raise UnsupportedError("compile under DeepSpeed is not estimated: no probe runs it")
        if self._is_known(setting) or (not self.answers and _any_batch(setting) in self._compiled):
            return True
        self.unrecorded.append(setting)
        return False

    def compile_steps(self, *goals: Choice) -> bool:
        """Records what was asked for and is not known, compiled at the batch of the first."""
        asked = list(dict.fromkeys(_any_batch(setting) for setting in self.unrecorded))
        first = goals[0].setting
        at = {"batch_size": first.batch_size, "accumulate": min(first.accumulate, 2)}
        steps = [ResolvedSetting(one.model_copy(update=at)) for one in asked[:MAX_COMPILED]]
        record_ledgers([(self.wish.model, s, self.card) for s in steps], limit_seconds=MAX_SECONDS)
        known = [setting for setting in steps if self._is_known(setting)]
        self._compiled |= {_any_batch(one): (one.batch_size, one.accumulate) for one in known}
        self.unrecorded.clear()
        return bool(known)

    def record(self, choices: Iterable[Choice]) -> bool:
        """Records them at their own batches; whether any was not."""
        settings = [self.resolved(choice.setting) for choice in choices]
        missing = [setting for setting in settings if not self._is_known(setting)]
        record_ledgers([(self.wish.model, setting, self.card) for setting in missing])
        return bool(missing)

    def at(self, choice: Choice) -> Estimate:
        found = self._between(choice)
        if found is None:
            return super().at(choice)
        by, of = found
        return combined(by, self.resolved(choice.setting), self.at(of[-1]), *map(self.at, of))

    def _time(self, choice: Choice) -> StepTime:
        found = self._between(choice)
        if found is None:
            return super()._time(choice)
        by, of = found
        times = [self._time(one) for one in of]
        return combined_time(by, self.resolved(choice.setting), times[-1], *times)

    def _between(self, choice: Choice) -> tuple[Combine, list[Choice]] | None:
        """What makes the figures of a choice of those of others; None where it has its own."""
        setting = self.resolved(choice.setting)
        if self.answers or self._is_known(setting):
            return None
        low, high = (self._as(choice, point) for point in self._points(setting))
        if choice in (low, high):
            return None
        if setting.compile != "off":
            eager = {"compile": "off", "activation_memory_budget": 1.0}
            uncompiled = (self._as(c, c.setting.model_copy(update=eager)) for c in (choice, low))
            return _in_proportion, [*uncompiled, low]
        return on_line(low.setting, high.setting, setting), [low, high]

    def least_bytes(self, choice: Choice) -> int:
        """Its workspaces are among what is live."""
        return self.at(choice).peak_live_bytes + self._overheads.context_bytes

    def least_high_bytes(self, choice: Choice) -> int:
        return self.at(choice).high_bytes

    def surely_exceeds(self, choice: Choice, budget: int) -> bool:
        return False

    def shares_eager_step(self, choice: Choice) -> bool:
        return False

    def operation_names(self, choice: Choice) -> frozenset[str]:
        return self._ledger(self._points(self.resolved(choice.setting))[0]).operation_names

    def _points(self, setting: ResolvedSetting) -> tuple[ResolvedSetting, ResolvedSetting]:
        """The setting at the batches between which it lies."""
        wish, unit = self.wish, batch_unit(setting)
        low, high = LEAST_BATCH * unit, MOST_BATCH * unit
        parts = setting.accumulate
        if setting.compile != "off" and _any_batch(setting) in self._compiled:
            low, parts = self._compiled[_any_batch(setting)]
            high = low
        elif not wish.is_splittable and (wish.share is not None or "batch_size" in wish.keep):
            low = high = setting.batch_size
        elif wish.share is not None:
            high = max(wish.share // min(setting.accumulate, 2), unit)
            low = min(SAMPLE_BATCH if setting.accumulate == 1 else low, high)
            if low == high:  # there is nothing between: each is recorded
                low = high = setting.batch_size
        points = [{"batch_size": size, "accumulate": parts} for size in (low, high)]
        first, last = (ResolvedSetting(setting.model_copy(update=point)) for point in points)
        return first, last

    def _as(self, choice: Choice, setting: TrainSetting) -> Choice:
        fields = {"batch_size", "accumulate", "compile", "activation_memory_budget"}
        changed = choice.setting.model_copy(update={f: getattr(setting, f) for f in fields})
        return Choice(changed, choice.expandable)

    def _is_known(self, setting: ResolvedSetting) -> bool:
        return isinstance(kept.find(kept.step_of(self.wish.model, setting, self.card)), Ledger)

    def _ledger(self, setting: ResolvedSetting) -> Ledger:
        return step_ledger(self.wish.model, setting, recorded=True, gpu=self.card)


def _in_proportion(eager: float, eager_there: float, compiled_there: float) -> float:
    return eager * compiled_there / eager_there if eager_there else compiled_there


def _any_batch(setting: TrainSetting) -> TrainSetting:
    """What is compiled alike: kernels that are tuned, and CUDA graphs, change no buffer."""
    return setting.model_copy(update={"batch_size": 1, "accumulate": 1, "compile": "default"})


def estimates_of(wish: Wish, like: Estimates | None = None) -> Estimates:
    """Those of a wish; `like` are those of the same model."""
    if is_on_shapes(wish.model, wish.sample.setting):
        return Estimates(wish, like)
    return RecordedEstimates(wish, like if isinstance(like, RecordedEstimates) else None)
