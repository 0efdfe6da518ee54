"""Estimates of many choices of one model, from few recordings; and what bounds them cheaply.

A step on shapes is recorded once for all batches and compile modes. What is live at its peak bounds
a device's bytes from below, at any batch, without a replay of the allocator. Legend: B batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from planner.advice.wish import Choice, Wish
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.setting import GRAPH_MODES
from planner.core.units import MIB
from planner.estimation.estimate import Estimate, estimate_ledger
from planner.estimation.ledgers import affine_step, is_on_shapes, record_ledgers, step_ledger
from planner.ledger.affine import HUGE, AffineLedger
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger
from planner.machine.hardware.overheads import overheads_for, was_emulated
from planner.memory.compiled import BOUNDED, has_known_graphs, may_recompute_at_once
from planner.memory.profile import steady_step, walk_ledger
from planner.recording import kept
from planner.throughput.prediction import DeviceRates, StepTime, rates_for
from planner.throughput.result import APART, exchanges_of, is_slower, step_time

MAX_LEDGERS = 16  # held at once, each of some 10 MiB
# Requests are rounded up to 512 B one by one; their line is rounded once. Less than this for the
# few thousand requests of a step.
ROUNDING = 2 * MIB
_BYTES = 4  # of a gradient
MOST_DOUBT = 0.9  # links may be doubtful by more


@dataclass(frozen=True)
class Line:
    """An eager step at every batch from 2 on. `hull` are the instants of the steady step at which
    the most is alive at some batch, as (bytes per image, fixed bytes)."""

    ledger: AffineLedger

    @cached_property
    def _at_huge(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, int]]:
        huge = self.ledger.ledger(HUGE)
        steady = steady_step(huge)
        walked = walk_ledger(huge)
        alive = walked.alive[walked.num_served(steady.steady_from) :]
        hull = _upper_hull(divmod(num_bytes, HUGE) for num_bytes in set(alive))
        return hull, divmod(steady.saved_bytes, HUGE)

    @property
    def hull(self) -> tuple[tuple[int, int], ...]:
        return self._at_huge[0]

    def live_bytes(self, batch_size: int) -> int:
        """What is alive at the peak at least."""
        return max(slope * batch_size + fixed for slope, fixed in self.hull) - ROUNDING

    def saved_bytes(self, batch_size: int) -> int:
        """What forward saves for backward, to within ROUNDING."""
        slope, fixed = self._at_huge[1]
        return slope * batch_size + fixed


def _upper_hull(lines: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Of lines (slope, value at 0) those that are the highest at some B of 0 or more."""
    best: dict[int, int] = {}
    for slope, fixed in lines:
        best[slope] = max(fixed, best.get(slope, fixed))
    hull: list[tuple[int, int]] = []
    for slope, fixed in sorted(best.items()):
        while hull and hull[-1][1] <= fixed:  # below it from B = 0 on
            hull.pop()
        while len(hull) > 1 and _is_hidden(hull[-2], hull[-1], (slope, fixed)):
            hull.pop()
        hull.append((slope, fixed))
    return tuple(hull)


def _is_hidden(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether line b lies below a or c everywhere; slopes rise from a to c."""
    return (c[0] - a[0]) * (a[1] - b[1]) >= (b[0] - a[0]) * (a[1] - c[1])


class Estimates:
    """Estimates for a wish's card and a model on shapes. Each is the very one that
    `planner.estimate` makes, but for what fits only where the allocator frees cached memory and
    tries again: that costs time which no estimate knows, and does not fit here.

    Raises UnsupportedError for a choice that has no step.
    """

    def __init__(self, wish: Wish, like: Estimates | None = None) -> None:
        """`like` are those of the same model, whose recordings are shared."""
        self.wish = wish
        self.rates: DeviceRates = rates_for(wish.rated, wish.model)
        self.num_replays = 0
        outside = overheads_for(wish.gpu)
        self._outside_bytes = (
            outside.num_workspaces * outside.workspace_bytes + outside.context_bytes
        )
        self._overheads = outside
        self._reserved_error = {
            known: overheads_for(wish.gpu, is_known=known).reserved_error for known in (True, False)
        }
        self._resolved: dict[TrainSetting, ResolvedSetting] = {}
        self._lines: dict[ResolvedSetting, Line] = like._lines if like else {}
        self._ledgers: dict[object, Ledger] = like._ledgers if like else {}
        self._times: dict[ResolvedSetting, StepTime] = {}
        self._found: dict[Choice, Estimate] = {}
        self._is_kept: dict[kept.Step, bool] = {}
        self.answers = False

    def resolved(self, setting: TrainSetting) -> ResolvedSetting:
        """As the model's library runs it. Raises UnsupportedError where it does not."""
        if setting not in self._resolved:
            self._resolved[setting] = self.wish.resolved(setting)
        return self._resolved[setting]

    def has_step(self, choice: Choice) -> bool:
        """Whether a choice can be estimated without recording it for minutes. Raises PlannerError
        for one that nobody estimates."""
        setting = self.resolved(choice.setting)
        return is_on_shapes(self.wish.model, setting)

    def compile_steps(self, *goals: Choice) -> bool:
        """Records the steps of `goals` that are estimated as eager ones; whether there are any."""
        steps = [self.resolved(goal.setting) for goal in goals if self.at(goal).as_eager]
        record_ledgers([(self.wish.model, step, self.wish.gpu) for step in steps])
        for found in (self._found, self._times, self._ledgers, self._is_kept):
            found.clear()
        return bool(steps)

    def line(self, choice: Choice) -> Line:
        """The recorded step of a choice, whatever its batch."""
        return self._line(self.resolved(choice.setting))

    def at(self, choice: Choice) -> Estimate:
        """The estimate of a choice in full."""
        found = self._found.get(choice)
        if found is None:
            self.num_replays += 1
            wish, setting = self.wish, self.resolved(choice.setting)
            found = self._found[choice] = estimate_ledger(
                wish.model,
                setting,
                self._ledger(setting),
                wish.gpu,
                wish.memory_bytes,
                wish.config(choice),
                None if wish.gpu else self.rates,
                wish.link,
                time=self._time(choice) if wish.gpu else None,
            )
        return found

    def record(self, choices: Iterable[Choice]) -> bool:
        """Whether any of them lay between others: on shapes none does."""
        return False

    def least_bytes(self, choice: Choice) -> int:
        """What the device needs at least, from what is live at the peak. No replay."""
        setting = self.resolved(choice.setting)
        if setting.batch_size == 1 or self._is_compiled(choice):
            live = steady_step(self._ledger(setting)).peak_bytes
        else:
            live = self._line(setting).live_bytes(setting.batch_size)
        return live + self._outside_bytes

    def surely_exceeds(self, choice: Choice, budget: int) -> bool:
        """Whether a choice without accumulation is known not to fit by its sibling with it, which
        holds its gradients besides and is recorded already."""
        setting = choice.setting
        if setting.accumulate > 1 or setting.batch_size == 1:
            return False
        sibling = setting.model_copy(update={"accumulate": 2, "optimizer_in_backward": False})
        try:
            key = _alike(self.resolved(sibling))
        except PlannerError:
            return False
        line = self._lines.get(key)
        if line is None:
            return False
        # Gradients that the sibling has already, and those that die at once in backward.
        gradients = 2 * _BYTES * line.ledger.at.num_parameters
        live = line.live_bytes(setting.batch_size) - gradients
        return live + self._outside_bytes > budget

    def shares_eager_step(self, choice: Choice) -> bool:
        """Whether a compiled choice is estimated from the eager step."""
        return choice.setting.compile != "off" and not self._is_compiled(choice)

    def operation_names(self, choice: Choice) -> frozenset[str]:
        """Of torch, in its eager step."""
        return self.line(choice).ledger.at.operation_names

    def _is_compiled(self, choice: Choice) -> bool:
        """Whether its compiled step is known."""
        setting = self.resolved(choice.setting)
        if not has_known_graphs(self.wish.model, setting):
            return False
        step = kept.step_of(self.wish.model, setting, self.wish.gpu)
        if step not in self._is_kept:
            self._is_kept[step] = isinstance(kept.find(step), Ledger)
        return self._is_kept[step]

    def least_high_bytes(self, choice: Choice) -> int:
        """What the upper end of an estimate is at least."""
        if self._is_compiled(choice):
            return self.at(choice).high_bytes
        live = self.least_bytes(choice) - self._overheads.context_bytes
        factor = 1 + self._reserved_error[was_emulated(self.wish.model, choice.setting)]
        if choice.setting.compile != "off":
            factor = BOUNDED.high
            live += self._least_recomputed(choice)
        return int(live * factor) + self._overheads.context_high_bytes

    def _least_recomputed(self, choice: Choice) -> int:
        """What checkpointing saves, at least, where it may come to nothing (`BOUNDED`)."""
        wish, setting = self.wish, choice.setting
        if not (
            isinstance(wish.model, SwinConfig)
            and has_known_graphs(wish.model, setting)
            and may_recompute_at_once(setting)
        ):
            return 0
        whole = replace(choice, setting=setting.model_copy(update={"checkpointing": "none"}))
        saved = [self.line(c).saved_bytes(setting.batch_size) for c in (choice, whole)]
        return max(0, saved[1] - saved[0] - 2 * ROUNDING)

    def fits_surely(self, choice: Choice, budget: int) -> bool:
        """Whether even the upper end of the estimate fits; estimated only where it may."""
        return self.least_high_bytes(choice) <= budget and bool(self.at(choice).fits_surely)

    def seconds(self, choice: Choice) -> float:
        """Of one optimizer step."""
        return self._time(choice).step_seconds

    def matrix_flops(self, choice: Choice) -> float:
        """Of one optimizer step, by matmuls, convolutions and attention."""
        return self._time(choice).matrix_flops

    def rate(self, choice: Choice) -> float:
        """Images per second of one device."""
        return choice.setting.batch_size * choice.setting.accumulate / self.seconds(choice)

    def costs_both(self, choice: Choice, base: Choice) -> bool:
        """Whether a choice is slower than `base` and needs more memory."""
        if self.rate(choice) >= self.rate(base):
            return False
        return self.least_bytes(choice) > self.least_bytes(base)

    def is_slower(self, choice: Choice, fastest: Choice) -> bool:
        """Whether a choice is slower than `fastest`, whatever the card's rates are."""
        return is_slower(self._time(choice), self._time(fastest))

    def slowest_alike(self, fastest: Choice) -> float:
        """As many times as long what `is_slower` cannot tell from `fastest` takes at most."""
        rates = self.rates
        doubt = max(rates.uncertainty, rates.other_uncertainty, self._time(fastest).uncertainty)
        doubt = min(doubt, MOST_DOUBT)
        return max(APART, (1 + doubt) / (1 - doubt))

    def _time(self, choice: Choice) -> StepTime:
        setting = self.resolved(choice.setting)
        if setting not in self._times:
            ledger = self._ledger(setting)
            exchanges = exchanges_of(ledger, setting, self.wish.rated, self.wish.link)
            took = step_time(ledger, setting, self.rates, exchanges)
            assert took is not None, "there are rates"
            self._times[setting] = took
        return self._times[setting]

    def _line(self, setting: ResolvedSetting) -> Line:
        key = _alike(setting)
        if key not in self._lines:
            line = affine_step(self.wish.model, setting)
            if line is None:
                raise UnsupportedError(f"{self.wish.model.title} has no step on shapes.")
            self._lines[key] = Line(line)
        return self._lines[key]

    def _ledger(self, setting: ResolvedSetting) -> Ledger:
        """As `step_ledger` gives it. Compile modes that share one share the object."""
        is_pooled = setting.compile in GRAPH_MODES and self._is_compiled(Choice(setting))
        is_own = is_pooled or self._is_compiled(Choice(setting))
        key = _alike(setting), setting.batch_size, is_own, is_pooled
        if key not in self._ledgers:
            while len(self._ledgers) >= MAX_LEDGERS:
                del self._ledgers[next(iter(self._ledgers))]
            self._ledgers[key] = step_ledger(self.wish.model, setting, gpu=self.wish.gpu)
        return self._ledgers[key]


def _alike(setting: TrainSetting) -> ResolvedSetting:
    """The eager step whose line one is read off, whatever the batch."""
    parts = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    eager = ResolvedSetting(setting.uncompiled())
    return eager.model_copy(update={"batch_size": 1, "accumulate": parts})
