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
from planner.core.schema.distribution import DEEPSPEED
from planner.core.schema.setting import GRAPH_MODES
from planner.core.units import MIB
from planner.estimation.estimate import Estimate, estimate_ledger
from planner.estimation.ledgers import affine_step, is_on_shapes, step_ledger
from planner.ledger.affine import HUGE, AffineLedger
from planner.ledger.ledger import Ledger
from planner.libraries.limits import batch_unit
from planner.machine.hardware.overheads import overheads_for, was_emulated
from planner.memory.compiled import (
    BOUNDED,
    TRACED,
    has_known_graphs,
    is_compiled,
    may_recompute_at_once,
)
from planner.memory.profile import steady_step, walk_ledger
from planner.step.zero import unknown
from planner.throughput.prediction import DeviceRates, StepTime, rates_for
from planner.throughput.result import APART, exchanges_of, is_slower, step_time
from planner.trace.kept_step import alike, traced_step

MAX_LEDGERS = 16  # held at once, each of some 10 MiB
# Requests are rounded up to 512 B one by one; their line is rounded once. Less than this for the
# few thousand requests of a step.
ROUNDING = 2 * MIB
_BYTES = 4  # of a gradient
MOST_DOUBT = 0.9  # links may be doubtful by more
_EAGER = {"compile": "off", "activation_memory_budget": 1.0}


@dataclass(frozen=True)
class Line:
    """A step at every batch from 2 on. `hull` are the instants of the steady step at which the most
    is alive at some batch, as (bytes per image, fixed bytes)."""

    ledger: AffineLedger

    @cached_property
    def is_compiled(self) -> bool:
        return is_compiled(self.ledger.at)

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
    """Estimates for a wish's model and card. Each is the very one that `planner.estimate` makes,
    but for what fits only where the allocator frees cached memory and tries again: that costs
    time which no estimate knows, and does not fit here.

    Raises UnsupportedError for a choice that needs a trace which is not kept.
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
        self._ledgers: dict[tuple[int, int, bool], Ledger] = like._ledgers if like else {}
        self._times: dict[ResolvedSetting, StepTime] = {}
        self._found: dict[Choice, Estimate] = {}
        self.untraced: list[ResolvedSetting] = []  # whose steps were asked for

    def resolved(self, setting: TrainSetting) -> ResolvedSetting:
        """As the model's library runs it. Raises UnsupportedError where it does not."""
        if setting not in self._resolved:
            self._resolved[setting] = self.wish.resolved(setting)
        return self._resolved[setting]

    def has_step(self, choice: Choice) -> bool:
        """Whether the step of a choice is on shapes or its trace is kept, so that nothing need be
        traced. Raises PlannerError for one that nobody estimates, or whose trace failed."""
        setting = self.resolved(choice.setting)
        error = unknown(setting) if setting.parallelism in DEEPSPEED else None
        if error is not None:
            raise error
        if is_on_shapes(self.wish.model, setting):
            return True
        model = self.wish.model
        if alike(model, setting) in self._lines or affine_step(model, setting) is not None:
            return True
        step = traced_step(model, setting)
        failed = step.error(2 * batch_unit(setting))
        if failed is not None:
            raise failed
        if step.reason:
            why = "its compiled step is another at each batch" if setting.compiles else step.reason
            raise UnsupportedError(f"advice compares many batches: {why}")
        self.untraced.append(setting)
        return False

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

    def least_bytes(self, choice: Choice) -> int:
        """What the device needs at least, from what is live at the peak. No replay."""
        setting = self.resolved(choice.setting)
        if setting.batch_size == 1:
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
            key = alike(self.wish.model, self.resolved(sibling.model_copy(update=_EAGER)))
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
        return choice.setting.compile != "off" and not self.line(choice).is_compiled

    def least_high_bytes(self, choice: Choice) -> int:
        """What the upper end of an estimate is at least."""
        live = self.least_bytes(choice) - self._overheads.context_bytes
        factor = 1 + self._reserved_error[was_emulated(self.wish.model, choice.setting)]
        if choice.setting.compile != "off":
            is_compiled = self.line(choice).is_compiled
            factor = (TRACED if is_compiled else BOUNDED).high
            live += 0 if is_compiled else self._least_recomputed(choice)
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
        key = alike(self.wish.model, setting)
        if key not in self._lines:
            eager = alike(self.wish.model, setting.model_copy(update={"compile": "off"}))
            line = affine_step(self.wish.model, setting)
            if line is None:
                raise UnsupportedError(f"{self.wish.model.title} has no kept trace of this step.")
            known = self._lines.get(eager)
            # Where no compiled step is kept, the eager one stands for it.
            is_same = known is not None and known.ledger is line
            self._lines[key] = known if known is not None and is_same else Line(line)
        return self._lines[key]

    def _ledger(self, setting: ResolvedSetting) -> Ledger:
        """As `step_ledger` gives it. Compile modes that share one share the object."""
        line = self._line(setting)
        is_pooled = line.is_compiled and setting.compile in GRAPH_MODES
        key = id(line), setting.batch_size, is_pooled
        if key not in self._ledgers:
            while len(self._ledgers) >= MAX_LEDGERS:
                del self._ledgers[next(iter(self._ledgers))]
            self._ledgers[key] = step_ledger(self.wish.model, setting)
        return self._ledgers[key]
