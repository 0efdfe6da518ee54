"""The table of a wish: the bytes and seconds of each choice; and the ranking of the choices.

A few batches of each combination of levers are estimated; the figures of the others are
interpolated. What an answer shows is estimated at its own batch, and the table ranked anew, until
nothing that is shown is interpolated.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner.advice.interpolation import (
    FEW_MICRO_BATCHES,
    Interpolation,
    extrapolate_to,
    on_line,
    scale_like_compiled,
)
from planner.advice.wish import SAMPLE_BATCH, Choice, Wish
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import ResolvedSetting, TrainSetting
from planner.core.schema.setting import DEEPSPEED, GRAPH_MODES
from planner.estimation.estimate import (
    Estimate,
    estimate_ledger,
)
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import LEDGER_MICRO_BATCHES, Ledger
from planner.libraries.limits import batch_multiple
from planner.machine.hardware.overheads import overheads_for
from planner.memory.compiled import has_known_graphs
from planner.recording import recordings
from planner.throughput.prediction import step_time
from planner.throughput.rates import rates_for
from planner.throughput.result import Throughput, is_slower
from planner.throughput.timeline import find_exchanges

SMALLEST_BATCH = 8  # estimated where the batch is free, beside SAMPLE_BATCH
BUDGET_UNKNOWN = "what it saves is known only of a recorded step: 'planner estimate --record'"
MAX_COMPILED = 4  # steps that are compiled for one answer, each some minutes
MAX_SECONDS = 900.0  # for all of them
MAX_RANKINGS, MAX_RECORDED_RANKINGS = 20, 4  # of a table; what is recorded takes time
MAX_LEDGERS = 16  # held at once, each of some 10 MiB
# The front is for choosing from: each choice on it needs less than the one before it by this share
# of the memory at least, and none is slower than this share of the fastest. Judgements.
FRONT_STEP = 0.05
FRONT_END = 0.7
DOUBT = 0.05  # the share by which interpolated bytes may be too many: a guess


class Table:
    """Estimates of a wish's choices.

    An estimate that is not interpolated is the one that `planner.estimate` makes, with one
    exception: a setting that fits only where the allocator frees cached memory and tries again
    does not fit here, since no estimate knows what that costs in time.

    The compiled step of a model that is recorded can be estimated only where it was recorded: at
    its own batch, or at any batch if the wish lets steps be compiled.
    """

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.interpolates = True
        self.is_on_shapes = is_on_shapes(wish.model, wish.sample.setting)
        self.rates = rates_for(wish.rates_of, wish.model)
        self.unrecorded: list[ResolvedSetting] = []  # whose compiled steps were asked for
        self.failed: dict[Choice, PlannerError] = {}  # the choices that a ranking left out
        self._resolved: dict[TrainSetting, ResolvedSetting] = {}
        self._ledgers: dict[object, Ledger] = {}
        # Of each compiled step that was recorded, the batch and the micro-batches.
        self._compiled: dict[TrainSetting, tuple[int, int]] = {}
        self._forget()

    def _forget(self) -> None:
        """Forgets everything but the ledgers."""
        self._estimates: dict[Choice, Estimate] = {}
        self._times: dict[Choice, Throughput] = {}
        self._settled: set[Choice] = set()
        self._interpolated: set[Choice] = set()
        self._settled_batches: dict[Choice, set[int]] = {}  # by the choice without its batch
        self._is_kept: dict[recordings.RecordedStep, bool] = {}

    def resolved(self, setting: TrainSetting) -> ResolvedSetting:
        """The setting as the model's library runs it. Raises UnsupportedError where it does not."""
        if setting not in self._resolved:
            self._resolved[setting] = self.wish.resolved(setting)
        return self._resolved[setting]

    def has_step(self, choice: Choice) -> bool:
        """Whether a choice can be estimated without compiling it for minutes. Raises PlannerError
        for one that cannot be estimated at all."""
        setting = self.resolved(choice.setting)
        if self.is_on_shapes:
            if setting.activation_memory_budget < self.wish.asked.activation_memory_budget:
                raise UnsupportedError(BUDGET_UNKNOWN, "Ask 'planner estimate --record'.")
            return is_on_shapes(self.wish.model, setting)
        if setting.compile == "off":
            interpolation = self._interpolation(choice, of_bytes=True)
            first = interpolation.choices[0].setting if interpolation else setting
            error = self._record([self.resolved(first)])[0]
            if error is not None:
                raise error
            return True
        if setting.parallelism in DEEPSPEED:
            raise UnsupportedError("no probe compiles under DeepSpeed", "Leave compile off.")
        is_at_another_batch = self.interpolates and _compiled_key(setting) in self._compiled
        if is_at_another_batch or self._is_recorded(setting):
            return True
        self.unrecorded.append(setting)
        return False

    def compile_steps(self, goals: Sequence[Choice]) -> bool:
        """Records compiled steps: on shapes those of `goals` that are estimated as eager ones; of a
        model that is recorded, the `unrecorded` ones at the batch of the first goal. Returns
        whether any could be recorded."""
        if self.is_on_shapes:
            steps = [self.resolved(goal.setting) for goal in goals if self.estimate(goal).as_eager]
        else:
            keys = list(dict.fromkeys(_compiled_key(setting) for setting in self.unrecorded))
            first = goals[0].setting
            num_micro_batches = min(first.accumulate, LEDGER_MICRO_BATCHES)
            updates = {"batch_size": first.batch_size, "accumulate": num_micro_batches}
            steps = [key.model_copy(update=updates) for key in keys[:MAX_COMPILED]]
        self._record(steps, limit_seconds=MAX_SECONDS)
        self._forget()
        recorded = [step for step in steps if self._is_recorded(step)]
        self._compiled |= {_compiled_key(s): (s.batch_size, s.accumulate) for s in recorded}
        self.unrecorded.clear()
        return bool(recorded)

    def _record(
        self, steps: Iterable[ResolvedSetting], recorded: bool = True,
        limit_seconds: float | None = None,
    ) -> list[PlannerError | None]:  # fmt: skip
        requests = [(self.wish.model, step, self.wish.target.gpu) for step in steps]
        return record_ledgers(requests, limit_seconds=limit_seconds, recorded=recorded)

    def settle(self, choices: Iterable[Choice]) -> bool:
        """Estimates each choice at its own batch; returns whether any had been interpolated."""
        interpolated = [choice for choice in choices if self.is_interpolated(choice)]
        self._record((self.resolved(c.setting) for c in interpolated), recorded=False)
        self._settled.update(interpolated)
        for choice in interpolated:
            batches = self._settled_batches.setdefault(_without_batch(choice), set())
            batches.add(choice.setting.batch_size)
        self._forget_interpolated()
        return bool(interpolated)

    def stop_interpolating(self) -> None:
        """From now on every choice is estimated at its own batch."""
        self._forget_interpolated()
        self.interpolates = False

    def _forget_interpolated(self) -> None:
        for choice in self._interpolated:
            self._estimates.pop(choice, None)
            self._times.pop(choice, None)
        self._interpolated.clear()

    def estimate(self, choice: Choice) -> Estimate:
        """The estimate of a choice. Raises PlannerError for one without a step."""
        if choice not in self._estimates:
            self._estimates[choice] = self._make_estimate(choice)
        return self._estimates[choice]

    def _make_estimate(self, choice: Choice) -> Estimate:
        wish, setting = self.wish, self.resolved(choice.setting)
        interpolation = self._interpolation(choice, of_bytes=True)
        if interpolation is not None:
            self._interpolated.add(choice)
            estimates = [self.estimate(other) for other in interpolation.choices]
            return interpolation.estimate(setting, estimates)
        target, ledger = wish.target_of(choice), self._ledger(setting)
        if target.gpu is None:
            return estimate_ledger(wish.model, setting, ledger, target, self.rates)
        return estimate_ledger(wish.model, setting, ledger, target, time=self._time(choice))

    def is_interpolated(self, choice: Choice) -> bool:
        """Whether the bytes of a choice are interpolated."""
        if choice in self._estimates:
            return choice in self._interpolated
        return self._interpolation(choice, of_bytes=True) is not None

    def needed_bytes(self, choice: Choice) -> float:
        """The bytes that the device needs. Where they are interpolated, the fewest that they may
        be, so that no choice is passed over by mistake."""
        estimate = self.estimate(choice)
        if not self.is_interpolated(choice):
            return estimate.device_total_bytes
        is_whole = self.wish.is_splittable and choice.setting.accumulate == 1
        gradients = 4 * estimate.num_parameters if is_whole else 0  # bytes of fp32, at most
        return (1 - DOUBT) * estimate.device_total_bytes - gradients

    def fits(self, choice: Choice) -> bool:
        """Whether a choice fits or, where its bytes are interpolated, may fit."""
        estimate = self.estimate(choice)
        if not self.is_interpolated(choice):
            return bool(estimate.fits)
        return self.needed_bytes(choice) <= (estimate.budget_bytes or 0)

    def least_bytes(self, choice: Choice) -> int:
        """The bytes that are alive at the peak, and the CUDA context's: without what the allocator
        rounds and keeps."""
        context_bytes = overheads_for(self.wish.target.gpu).context_bytes
        return self.estimate(choice).peak_live_bytes + context_bytes

    def seconds(self, choice: Choice) -> float:
        """The seconds of one optimizer step."""
        return self._time(choice).step_seconds

    def matrix_flops(self, choice: Choice) -> float:
        """The FLOPs of one optimizer step in matrix products, convolutions and attention."""
        return self._time(choice).matrix_flops

    def rate(self, choice: Choice) -> float:
        """Images per second of one device."""
        return choice.setting.images_per_device_step / self.seconds(choice)

    def is_slower(self, choice: Choice, fastest: Choice) -> bool:
        """Whether a choice is slower than `fastest`, whatever the card's rates are."""
        return is_slower(self._time(choice), self._time(fastest))

    def operation_names(self, choice: Choice) -> frozenset[str]:
        """The names of torch's operations in the step."""
        interpolation = self._interpolation(choice, of_bytes=True)
        first = interpolation.choices[0] if interpolation else choice
        return self._ledger(self.resolved(first.setting)).operation_names

    def _time(self, choice: Choice) -> Throughput:
        if choice not in self._times:
            self._times[choice] = self._make_time(choice)
        return self._times[choice]

    def _make_time(self, choice: Choice) -> Throughput:
        setting = self.resolved(choice.setting)
        interpolation = self._interpolation(choice)
        if interpolation is not None:
            self._interpolated.add(choice)
            times = [self._time(other) for other in interpolation.choices]
            return interpolation.time(setting, times)
        ledger = self._ledger(setting)
        exchanges = find_exchanges(ledger, setting, self.wish.rates_of, self.wish.target.link)
        return step_time(ledger, setting, self.rates, exchanges)

    def _interpolation(self, choice: Choice, of_bytes: bool = False) -> Interpolation | None:
        """How the figures of a choice follow from those of others; None where it has its own.

        The bytes of a step do not depend on the number of its micro-batches, from two on. A step
        of one keeps no gradients beside, and so needs less: its bytes are bounded by those of two.
        The times of many micro-batches follow from those of few, at the same batch.
        """
        setting, wish = self.resolved(choice.setting), self.wish
        if not self.interpolates or choice in self._settled or self._is_recorded(setting):
            return None
        num_micro_batches = setting.accumulate
        if wish.is_splittable and num_micro_batches == 1:
            frees_early = setting.optimizer_in_backward or setting.compile in GRAPH_MODES
            if frees_early or not of_bytes or setting.batch_size <= SAMPLE_BATCH:
                return None
            num_micro_batches = LEDGER_MICRO_BATCHES
        if of_bytes:
            num_micro_batches = min(num_micro_batches, LEDGER_MICRO_BATCHES)
        low, high = self._end_points(choice, num_micro_batches)
        is_scaled = not self.is_on_shapes and setting.compile != "off"
        if choice in (low, high) or (low == high and not is_scaled):
            return None
        if num_micro_batches > FEW_MICRO_BATCHES[-1]:
            few = tuple(choice.updated({"accumulate": num}) for num in FEW_MICRO_BATCHES)
            return Interpolation(extrapolate_to(num_micro_batches), few)
        if is_scaled:
            eager = {"compile": "off", "activation_memory_budget": 1.0}
            others = choice.updated(eager), low.updated(eager), low
            return Interpolation(scale_like_compiled, others)
        if wish.images_per_device_step is None:
            low, high = self._nearest_points(choice, low, high)
        return Interpolation(on_line(low.setting, high.setting, setting), (low, high))

    def _end_points(self, choice: Choice, num_micro_batches: int) -> tuple[Choice, Choice]:
        """`choice` at the two batches, of so many micro-batches, that are estimated first; one
        choice twice where the batch is fixed or the compiled step was recorded at one."""
        wish, setting = self.wish, self.resolved(choice.setting)
        unit = batch_multiple(setting)
        low, high = SMALLEST_BATCH * unit, SAMPLE_BATCH * unit
        if setting.compile != "off" and _compiled_key(setting) in self._compiled:
            low, num_micro_batches = self._compiled[_compiled_key(setting)]
            high = low
        elif wish.keeps_batch:
            low = high = setting.batch_size
        elif wish.images_per_device_step is not None:
            # Often the batch that is shown, where it fits.
            half = max(wish.images_per_device_step // 2, unit)
            high = min(high, half) if self.is_on_shapes else half
            low = min(low, high)
        first, last = (
            choice.updated({"batch_size": batch_size, "accumulate": num_micro_batches})
            for batch_size in (low, high)
        )
        return first, last

    def _nearest_points(self, choice: Choice, low: Choice, high: Choice) -> tuple[Choice, Choice]:
        """The two batches, of `low`, `high` and those that were settled, that enclose a choice's;
        the last two on its side where none do."""
        settled = self._settled_batches.get(_without_batch(choice), ())
        batches = sorted({*settled, low.setting.batch_size, high.setting.batch_size})
        after = min(max(bisect(batches, choice.setting.batch_size), 1), len(batches) - 1)
        below, above = (choice.updated({"batch_size": b}) for b in batches[after - 1 : after + 1])
        return below, above

    def _is_recorded(self, setting: ResolvedSetting) -> bool:
        """Whether a recorded ledger is kept; on shapes only compiled steps are recorded."""
        if self.is_on_shapes and not has_known_graphs(setting):
            return False
        step = recordings.step_of(self.wish.model, setting, self.wish.target.gpu)
        if not self._is_kept.get(step):
            self._is_kept[step] = isinstance(recordings.find(step), Ledger)
        return self._is_kept[step]

    def _ledger(self, setting: ResolvedSetting) -> Ledger:
        """The ledger of a step. On shapes all compile modes share the eager one, unless the
        compiled step was recorded."""
        is_eager = self.is_on_shapes and not self._is_recorded(setting)
        key = (_eager_key(setting), setting.batch_size) if is_eager else setting
        if key not in self._ledgers:
            while len(self._ledgers) >= MAX_LEDGERS:
                del self._ledgers[next(iter(self._ledgers))]
            self._ledgers[key] = step_ledger(
                self.wish.model, setting, not self.is_on_shapes, self.wish.target.gpu
            )
        return self._ledgers[key]


def _without_batch(choice: Choice) -> Choice:
    return choice.updated({"batch_size": 1})


def _compiled_key(setting: ResolvedSetting) -> ResolvedSetting:
    """What compiled steps have in common whose buffers are the same: neither the batch, nor kernels
    that are tuned, nor CUDA graphs change them."""
    return setting.model_copy(update={"batch_size": 1, "accumulate": 1, "compile": "default"})


def _eager_key(setting: TrainSetting) -> TrainSetting:
    """What steps have in common whose eager ledgers differ in the batch only."""
    num_micro_batches = min(setting.accumulate, LEDGER_MICRO_BATCHES)
    updates = {"batch_size": 1, "accumulate": num_micro_batches}
    return setting.uncompiled().model_copy(update=updates)


@dataclass
class Ranking:
    """What an answer shows of the choices of a table.

    `best` fits and is recommended; `fastest` is the fastest by the figures; `fastest_sure` is the
    fastest whose upper end fits. `front` are choices that fit, fastest first, each the fastest that
    needs less than the one before it by FRONT_STEP of the memory. `ways` are the best of each way
    to save memory: the best of all first, then by speed. `fastest_of_ways` are those that `ways`
    were compared with. `nearest` needs the least of all, where nothing fits.
    """

    best: Choice | None = None
    fastest: Choice | None = None
    fastest_sure: Choice | None = None
    front: list[Choice] = field(default_factory=list)
    ways: list[Choice] = field(default_factory=list)
    nearest: Choice | None = None
    fastest_of_ways: list[Choice] = field(default_factory=list)

    @property
    def choices(self) -> list[Choice]:
        """What is shown, and what it was compared with."""
        single = (self.best, self.fastest, self.fastest_sure, self.nearest)
        return [*filter(None, single), *self.ways, *self.front, *self.fastest_of_ways]


def rank(table: Table, choices: Sequence[Choice], budget_bytes: int) -> Ranking:
    """The best of `choices`, and what is shown beside it, each estimated at its own batch.

    The best is not the fastest by a figure: of the choices that `Table.is_slower` cannot tell from
    the fastest it is one that fits surely, then the one whose images of a step are nearest to the
    wish's, then the fastest. Raises the PlannerError of the first choice where none can be
    estimated.
    """
    for _ in range(MAX_RANKINGS if table.is_on_shapes else MAX_RECORDED_RANKINGS):
        estimated = list(_estimated(table, choices))
        if not estimated and table.failed:
            raise next(iter(table.failed.values()))
        ranking = _rank_estimated(table, estimated, budget_bytes)
        if not table.settle(dict.fromkeys(ranking.choices)):
            return ranking
    exact = [c for c in _estimated(table, choices) if not table.is_interpolated(c)]
    return _rank_estimated(table, exact, budget_bytes)


def _estimated(table: Table, choices: Iterable[Choice]) -> Iterable[Choice]:
    """The choices that have a step, in an order in which those that share a ledger are
    neighbours."""

    def ledger_and_batch(choice: Choice) -> tuple[str, int]:
        return _eager_key(choice.setting).model_dump_json(), choice.setting.batch_size

    for choice in sorted(choices, key=ledger_and_batch):
        try:
            table.estimate(choice)
        except PlannerError as error:
            table.failed[choice] = error
        else:
            yield choice


def _rank_estimated(table: Table, choices: Sequence[Choice], budget_bytes: int) -> Ranking:
    plain = table.wish.asked
    fitting = [choice for choice in choices if table.fits(choice)]
    if not fitting:
        needs = [(table.needed_bytes(c), table.seconds(c), i) for i, c in enumerate(choices)]
        return Ranking(nearest=choices[min(needs)[-1]] if needs else None)
    fitting.sort(key=lambda c: (-round(table.rate(c), 6), len(c.setting.differences(plain))))
    best = _best(table, fitting)
    by_way: dict[object, list[Choice]] = {}
    for choice in fitting:
        by_way.setdefault(_way(choice), []).append(choice)
    others = [_best(table, members) for way, members in by_way.items() if way != _way(best)]
    return Ranking(
        best=best,
        fastest=fitting[0],
        fastest_sure=next((c for c in fitting if table.estimate(c).fits_surely), None),
        front=_front(table, fitting, budget_bytes),
        ways=[best, *sorted(others, key=table.rate, reverse=True)],
        fastest_of_ways=[members[0] for members in by_way.values()],
    )


def _best(table: Table, fitting: Sequence[Choice]) -> Choice:
    """The best of choices that fit, which come fastest first."""
    as_fast = [choice for choice in fitting if not table.is_slower(choice, fitting[0])]
    sure = [choice for choice in as_fast if table.estimate(choice).fits_surely]
    return min(sure or as_fast, key=table.wish.distance)


def _front(table: Table, fitting: Sequence[Choice], budget_bytes: int) -> list[Choice]:
    slowest, below = FRONT_END * table.rate(fitting[0]), budget_bytes + 1.0
    front = []
    for choice in fitting:
        if table.needed_bytes(choice) < below and table.rate(choice) >= slowest:
            front.append(choice)
            below = table.needed_bytes(choice) - FRONT_STEP * budget_bytes
    return front


def _way(choice: Choice) -> object:
    """The way in which a choice saves memory, whatever its micro-batch and compile mode."""
    free = {"batch_size": 1, "accumulate": 1, "compile": "off", "activation_memory_budget": 1.0}
    setting = choice.setting
    return setting.model_copy(update=free), setting.activation_memory_budget
