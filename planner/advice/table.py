"""The table of a wish: each choice's bytes and seconds; and what is chosen of it.

Few batches of each way to train are estimated, the others lie on the line between. What is shown is
estimated at its own batch, and the table sorted anew until nothing that is shown lies between.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner.advice.wish import SAMPLE_BATCH, Choice, Wish
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import ResolvedSetting, TrainSetting
from planner.core.schema.setting import DEEPSPEED, GRAPH_MODES
from planner.estimation.estimate import (
    Combine,
    Estimate,
    combined,
    combined_time,
    estimate_ledger,
    on_line,
)
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.ledger.ledger import RECORDED_MICRO_BATCHES, Ledger
from planner.libraries.limits import batch_unit
from planner.machine.hardware.overheads import overheads_for
from planner.memory.compiled import has_known_graphs
from planner.recording import recordings
from planner.throughput.prediction import step_time
from planner.throughput.rates import DeviceRates, rates_for
from planner.throughput.result import Throughput, is_slower
from planner.throughput.timeline import exchanges_of

LEAST_BATCH = 8  # at which a free batch is estimated, and at the sample's: others lie beyond
FEW_PARTS = RECORDED_MICRO_BATCHES, RECORDED_MICRO_BATCHES + 1  # from which times of more follow
MAX_COMPILED = 4  # steps that are compiled for one answer, each some minutes
MAX_SECONDS = 900.0  # for all of them
MAX_SORTS, MAX_RECORDED_SORTS = 20, 4  # of a table; what is recorded takes time
MAX_LEDGERS = 16  # held at once, each of some 10 MiB
# The front is for choosing from: its next choice needs less by this share of the memory at least,
# and none is slower than this share of the fastest. Judgements.
FRONT_STEP = 0.05
FRONT_END = 0.7
DOUBT = 0.05  # of bytes that lie between others: so much less they may be, as a guess


class Table:
    """Estimates of a wish's choices. At its own batch each is the very one that `planner.estimate`
    makes, but for what fits only where the allocator frees cached memory and tries again: that
    costs time which no estimate knows, and does not fit here.

    A model that is recorded has a compiled step only where that is recorded at its batch, or, where
    the wish lets steps be compiled, at any other. Raises PlannerError for a choice without a step.
    """

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.answers = False  # then nothing lies between
        self.is_on_shapes = is_on_shapes(wish.model, wish.sample.setting)
        self.rates: DeviceRates = rates_for(wish.rated, wish.model)
        self.unrecorded: list[ResolvedSetting] = []  # whose compiled steps were asked for
        self.failed: dict[Choice, PlannerError] = {}  # what a search left out, and why
        self._resolved: dict[TrainSetting, ResolvedSetting] = {}
        self._ledgers: dict[object, Ledger] = {}
        # Of what is compiled, the batch and the parts that it was recorded at.
        self._compiled: dict[TrainSetting, tuple[int, int]] = {}
        self._forget()

    def _forget(self) -> None:
        """All but the recordings."""
        self._found: dict[Choice, Estimate] = {}
        self._times: dict[Choice, Throughput] = {}
        self._settled: set[Choice] = set()
        self._between_others: set[Choice] = set()
        self._batches: dict[Choice, set[int]] = {}  # at which an arm was settled
        self._is_kept: dict[recordings.RecordedStep, bool] = {}

    def resolved(self, setting: TrainSetting) -> ResolvedSetting:
        """As the model's library runs it. Raises UnsupportedError where it does not."""
        if setting not in self._resolved:
            self._resolved[setting] = self.wish.resolved(setting)
        return self._resolved[setting]

    def has_step(self, choice: Choice) -> bool:
        """Whether a choice can be estimated without compiling it for minutes. Raises PlannerError
        for one that nobody estimates."""
        setting = self.resolved(choice.setting)
        if self.is_on_shapes:
            return is_on_shapes(self.wish.model, setting)
        if setting.compile == "off":
            between = self._between(choice, of_bytes=True)
            first = self.resolved(between[1][0].setting) if between else setting
            failed = record_ledgers([(self.wish.model, first, self.wish.gpu)])[0]
            if failed is not None:
                raise failed
            return True
        if setting.parallelism in DEEPSPEED:
            raise UnsupportedError("compile under DeepSpeed is not estimated: no probe runs it")
        is_elsewhere = not self.answers and _any_batch(setting) in self._compiled
        if is_elsewhere or self._is_recorded(setting):
            return True
        self.unrecorded.append(setting)
        return False

    def compile_steps(self, goals: Sequence[Choice]) -> bool:
        """Records the compiled steps of `goals` that are estimated as eager ones; of a model that
        is recorded what was asked for, at the batch of the first. Whether there are any."""
        if self.is_on_shapes:
            steps = [self.resolved(goal.setting) for goal in goals if self.at(goal).as_eager]
        else:
            asked = list(dict.fromkeys(_any_batch(setting) for setting in self.unrecorded))
            first = goals[0].setting
            at = {"batch_size": first.batch_size, "accumulate": min(first.accumulate, 2)}
            steps = [ResolvedSetting(one.model_copy(update=at)) for one in asked[:MAX_COMPILED]]
        record_ledgers(
            [(self.wish.model, s, self.wish.gpu) for s in steps], limit_seconds=MAX_SECONDS
        )
        self._forget()
        known = [setting for setting in steps if self._is_recorded(setting)]
        self._compiled |= {_any_batch(one): (one.batch_size, one.accumulate) for one in known}
        self.unrecorded.clear()
        return bool(known)

    def settle(self, choices: Iterable[Choice]) -> bool:
        """Estimates each at its own batch; whether any lay between others."""
        between = [choice for choice in choices if self.lies_between(choice)]
        settings = [self.resolved(choice.setting) for choice in between]
        record_ledgers([(self.wish.model, s, self.wish.gpu) for s in settings], recorded=False)
        self._settled.update(between)
        for choice in between:
            self._batches.setdefault(_arm(choice), set()).add(choice.setting.batch_size)
        self._forget_those_between()
        return bool(between)

    def answer(self) -> None:
        """From now on nothing lies between."""
        self._forget_those_between()
        self.answers = True

    def _forget_those_between(self) -> None:
        for choice in self._between_others:
            self._found.pop(choice, None)
            self._times.pop(choice, None)
        self._between_others.clear()

    def at(self, choice: Choice) -> Estimate:
        """The estimate of a choice."""
        if choice not in self._found:
            self._found[choice] = self._estimate(choice)
        return self._found[choice]

    def _estimate(self, choice: Choice) -> Estimate:
        wish, setting = self.wish, self.resolved(choice.setting)
        between = self._between(choice, of_bytes=True)
        if between is not None:
            self._between_others.add(choice)
            by, of = between
            return combined(by, setting, self.at(of[-1]), *map(self.at, of))
        return estimate_ledger(
            wish.model, setting, self._ledger(setting), wish.gpu, wish.memory_bytes,
            wish.config(choice), None if wish.gpu else self.rates, wish.link,
            time=self._time(choice) if wish.gpu else None,
        )  # fmt: skip

    def lies_between(self, choice: Choice) -> bool:
        """Whether its bytes are not of its own batch."""
        if choice in self._found:
            return choice in self._between_others
        return self._between(choice, of_bytes=True) is not None

    def need(self, choice: Choice) -> float:
        """The device's bytes; of what lies between others what they may be at least, so that it is
        not passed over."""
        found = self.at(choice)
        if not self.lies_between(choice):
            return found.device_total_bytes
        is_whole = self.wish.is_splittable and choice.setting.accumulate == 1
        gradients = 4 * found.num_parameters if is_whole else 0  # bytes of fp32, at most
        return (1 - DOUBT) * found.device_total_bytes - gradients

    def fits(self, choice: Choice) -> bool:
        """Whether a choice fits, or may where it lies between others."""
        found = self.at(choice)
        if not self.lies_between(choice):
            return bool(found.fits)
        return self.need(choice) <= (found.budget_bytes or 0)

    def least_bytes(self, choice: Choice) -> int:
        """What is alive at the peak, and the context: whatever the allocator rounds and keeps."""
        return self.at(choice).peak_live_bytes + overheads_for(self.wish.gpu).context_bytes

    def seconds(self, choice: Choice) -> float:
        """Of one optimizer step."""
        return self._time(choice).step_seconds

    def matrix_flops(self, choice: Choice) -> float:
        """Of one optimizer step, by matmuls, convolutions and attention."""
        return self._time(choice).matrix_flops

    def rate(self, choice: Choice) -> float:
        """Images per second of one device."""
        return choice.setting.batch_size * choice.setting.accumulate / self.seconds(choice)

    def is_slower(self, choice: Choice, fastest: Choice) -> bool:
        """Whether a choice is slower than `fastest`, whatever the card's rates are."""
        return is_slower(self._time(choice), self._time(fastest))

    def operation_names(self, choice: Choice) -> frozenset[str]:
        """Of torch, in its step."""
        between = self._between(choice, of_bytes=True)
        first = between[1][0] if between else choice
        return self._ledger(self.resolved(first.setting)).operation_names

    def _time(self, choice: Choice) -> Throughput:
        if choice not in self._times:
            self._times[choice] = self._timed(choice)
        return self._times[choice]

    def _timed(self, choice: Choice) -> Throughput:
        setting = self.resolved(choice.setting)
        between = self._between(choice)
        if between is not None:
            by, of = between
            if setting.accumulate > FEW_PARTS[-1]:
                by = _of_parts(setting.accumulate)
                of = [_with(choice, accumulate=parts) for parts in FEW_PARTS]
            times = [self._time(one) for one in of]
            return combined_time(by, setting, times[-1], *times)
        ledger = self._ledger(setting)
        exchanges = exchanges_of(ledger, setting, self.wish.rated, self.wish.link)
        return step_time(ledger, setting, self.rates, exchanges)

    def _between(
        self, choice: Choice, of_bytes: bool = False
    ) -> tuple[Combine, list[Choice]] | None:
        """What makes the figures of a choice of those of others; None where it has its own. Bytes
        are those of two parts, however many there are: what one part needs less is its gradients.
        """
        setting, wish = self.resolved(choice.setting), self.wish
        if self.answers or choice in self._settled or self._is_recorded(setting):
            return None
        parts = setting.accumulate
        if wish.is_splittable and parts == 1:
            is_whole = setting.optimizer_in_backward or setting.compile in GRAPH_MODES
            if is_whole or not of_bytes or setting.batch_size <= SAMPLE_BATCH:
                return None
            parts = RECORDED_MICRO_BATCHES
        if of_bytes:
            parts = min(parts, RECORDED_MICRO_BATCHES)
        low, high = (_with(choice, **point) for point in self._points(setting, parts))
        if choice in (low, high):
            return None
        if not self.is_on_shapes and setting.compile != "off":
            eager: dict[str, object] = {"compile": "off", "activation_memory_budget": 1.0}
            return _in_proportion, [_with(choice, **eager), _with(low, **eager), low]
        if low == high:
            return None
        if wish.share is None:
            low, high = self._around(choice, low, high)
        return on_line(low.setting, high.setting, setting), [low, high]

    def _around(self, choice: Choice, *known: Choice) -> tuple[Choice, Choice]:
        """The two batches that are `known`, or settled, between which a choice lies or beyond."""
        settled = self._batches.get(_arm(choice), ())
        sizes = sorted({*settled, *(one.setting.batch_size for one in known)})
        at = min(max(bisect(sizes, choice.setting.batch_size), 1), len(sizes) - 1)
        low, high = (_with(choice, batch_size=size) for size in sizes[at - 1 : at + 1])
        return low, high

    def _points(self, setting: ResolvedSetting, parts: int) -> list[dict[str, object]]:
        """The batches between which a setting lies, and their parts."""
        wish, unit = self.wish, batch_unit(setting)
        low, high = LEAST_BATCH * unit, SAMPLE_BATCH * unit
        if setting.compile != "off" and _any_batch(setting) in self._compiled:
            low, parts = self._compiled[_any_batch(setting)]
            high = low
        elif not wish.is_splittable and (wish.share is not None or "batch_size" in wish.keep):
            low = high = setting.batch_size
        elif wish.share is not None:
            half = max(wish.share // 2, unit)  # is shown, often, where it runs
            high = min(high, half) if self.is_on_shapes else half
            low = min(low, high)
        return [{"batch_size": size, "accumulate": parts} for size in (low, high)]

    def _is_recorded(self, setting: ResolvedSetting) -> bool:
        """Whether its ledger is kept; of a step on shapes, the compiled one's."""
        if self.is_on_shapes and not has_known_graphs(setting):
            return False
        step = recordings.step_of(self.wish.model, setting, self.wish.gpu)
        if not self._is_kept.get(step):
            self._is_kept[step] = isinstance(recordings.find(step), Ledger)
        return self._is_kept[step]

    def _ledger(self, setting: ResolvedSetting) -> Ledger:
        """On shapes compile modes share the eager one, where none is compiled."""
        is_eager = self.is_on_shapes and not self._is_recorded(setting)
        key = (_eager(setting), setting.batch_size) if is_eager else setting
        if key not in self._ledgers:
            while len(self._ledgers) >= MAX_LEDGERS:
                del self._ledgers[next(iter(self._ledgers))]
            self._ledgers[key] = step_ledger(
                self.wish.model, setting, recorded=not self.is_on_shapes, gpu=self.wish.gpu
            )
        return self._ledgers[key]


def _of_parts(parts: int) -> Combine:
    """Of the seconds of a step in FEW_PARTS those in more: each takes as long as the last."""
    return lambda a, b: a + (b - a) * (parts - FEW_PARTS[0])


def _with(choice: Choice, **fields: object) -> Choice:
    return replace(choice, setting=choice.setting.model_copy(update=fields))


def _arm(choice: Choice) -> Choice:
    return _with(choice, batch_size=1)


def _in_proportion(eager: float, eager_there: float, compiled_there: float) -> float:
    return eager * compiled_there / eager_there if eager_there else compiled_there


def _any_batch(setting: TrainSetting) -> TrainSetting:
    """What is compiled alike: kernels that are tuned, and CUDA graphs, change no buffer."""
    return setting.model_copy(update={"batch_size": 1, "accumulate": 1, "compile": "default"})


def _eager(setting: TrainSetting) -> TrainSetting:
    """The eager step that one is, whatever its batch."""
    parts = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    return setting.uncompiled().model_copy(update={"batch_size": 1, "accumulate": parts})


@dataclass
class Found:
    """`best` fits, and `fastest` of them by the figures; `surely` is the fastest whose upper end
    fits; `front` are choices that fit, fastest first, each the fastest that needs less than the one
    before it by FRONT_STEP of the memory; `ways` the best of each way to save memory, the best of
    all first and then by speed, `fastest_of_ways` what each was compared with; `nearest` needs the
    least of all, where nothing fits."""

    best: Choice | None = None
    fastest: Choice | None = None
    surely: Choice | None = None
    front: list[Choice] = field(default_factory=list)
    ways: list[Choice] = field(default_factory=list)
    nearest: Choice | None = None
    fastest_of_ways: list[Choice] = field(default_factory=list)

    @property
    def all(self) -> list[Choice]:
        """What is shown, and what that was compared with."""
        single = (self.best, self.fastest, self.surely, self.nearest)
        return [*filter(None, single), *self.ways, *self.front, *self.fastest_of_ways]


def search(table: Table, choices: Sequence[Choice], budget: int) -> Found:
    """The best of `choices`, and what is shown beside it, each at its own batch.

    The best is not the fastest by a figure: of those that `Table.is_slower` cannot tell from the
    fastest it is one that fits surely, then the one whose images of a step are nearest to the
    wish's, then the fastest. Raises the PlannerError of the first where none can be estimated.
    """
    for _ in range(MAX_SORTS if table.is_on_shapes else MAX_RECORDED_SORTS):
        rows = list(_estimated(table, choices))
        if not rows and table.failed:
            raise next(iter(table.failed.values()))
        found = _chosen(table, rows, budget)
        if not table.settle(dict.fromkeys(found.all)):
            return found
    own = [c for c in _estimated(table, choices) if not table.lies_between(c)]
    return _chosen(table, own, budget)


def _estimated(table: Table, choices: Iterable[Choice]) -> Iterable[Choice]:
    """Those that have a step; alike ones together, since they share a ledger."""
    for choice in sorted(choices, key=_step):
        try:
            table.at(choice)
        except PlannerError as error:
            table.failed[choice] = error
        else:
            yield choice


def _chosen(table: Table, rows: Sequence[Choice], budget: int) -> Found:
    plain = table.wish.plain
    fitting = [choice for choice in rows if table.fits(choice)]
    if not fitting:
        needs = [(table.need(c), table.seconds(c), i) for i, c in enumerate(rows)]
        return Found(nearest=rows[min(needs)[-1]] if needs else None)
    fitting.sort(key=lambda c: (-round(table.rate(c), 6), len(c.setting.differences(plain))))
    best = _best(table, fitting)
    ways: dict[object, list[Choice]] = {}
    for choice in fitting:
        ways.setdefault(_way(choice), []).append(choice)
    others = [_best(table, alike) for way, alike in ways.items() if way != _way(best)]
    return Found(
        best=best,
        fastest=fitting[0],
        surely=next((c for c in fitting if table.at(c).fits_surely), None),
        front=_front(table, fitting, budget),
        ways=[best, *sorted(others, key=table.rate, reverse=True)],
        fastest_of_ways=[alike[0] for alike in ways.values()],
    )


def _best(table: Table, fitting: Sequence[Choice]) -> Choice:
    """Of choices that fit, fastest first."""
    alike = [choice for choice in fitting if not table.is_slower(choice, fitting[0])]
    sure = [choice for choice in alike if table.at(choice).fits_surely]
    return min(sure or alike, key=table.wish.distance)


def _front(table: Table, fitting: Sequence[Choice], budget: int) -> list[Choice]:
    slowest, below = FRONT_END * table.rate(fitting[0]), budget + 1.0
    front = []
    for choice in fitting:
        if table.need(choice) < below and table.rate(choice) >= slowest:
            front.append(choice)
            below = table.need(choice) - FRONT_STEP * budget
    return front


def _way(choice: Choice) -> object:
    """What a way to save memory is, whatever its micro-batch and compile mode."""
    free = {"batch_size": 1, "accumulate": 1, "compile": "off", "activation_memory_budget": 1.0}
    setting = choice.setting
    return setting.model_copy(update=free), setting.activation_memory_budget


def _step(choice: Choice) -> tuple[str, int]:
    return _eager(choice.setting).model_dump_json(), choice.setting.batch_size
