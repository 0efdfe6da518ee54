"""`planner.advise`: from a wish to advice. Imports no torch, but where a model must be recorded."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal

from planner.advice.flags import command, device_flags, flags
from planner.advice.space import (
    NO_RECORDING,
    PLAINLY_COMBINED,
    Combinations,
    combine_levers,
    may_need_resorts,
)
from planner.advice.table import Ranking, Table, rank
from planner.advice.waterfall import (
    Bottleneck,
    WaterfallStep,
    apply_treatments,
    find_bottleneck,
    waterfall,
)
from planner.advice.wish import (
    ALLOWED,
    EFFECTS,
    FAITHFUL,
    LEVERS,
    NOT_COMPARED,
    Choice,
    Effect,
    Lever,
    Wish,
    read_wish,
)
from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.units import format_range
from planner.estimation.arguments import ModelLike, SettingLike, read_target
from planner.estimation.estimate import Estimate
from planner.machine.hardware.gpu import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.throughput.result import TrainingLength, read_length

MAX_ROUNDS = 3  # in which steps are compiled: with one, other steps may be the best


@dataclass(frozen=True)
class Way:
    """One way to run the wish: its estimate (bytes, images per second of one device), what is
    changed of the wish, what that changes for the result, and the command that estimates it."""

    setting: TrainSetting
    estimate: Estimate
    changes: tuple[tuple[str, object], ...]
    effects: tuple[str, ...]
    flags: tuple[str, ...]
    command: str

    @property
    def images_per_second(self) -> float:
        assert self.estimate.throughput is not None, "advice has rates"
        return self.estimate.throughput.images_per_second

    def as_json(self) -> dict[str, Any]:
        names = ("unit", "is_task", "allocator", "device_total_bytes", "low_bytes", "high_bytes",
                 "fits", "fits_surely", "as_eager", "cost")  # fmt: skip
        time = self.estimate.throughput
        own = {name: value for name, value in vars(self).items() if name != "estimate"}
        of_estimate = {name: getattr(self.estimate, name) for name in names}
        return {
            **own, **of_estimate, "changes": dict(self.changes),
            "images_per_second": self.images_per_second,
            "rate_uncertainty": time and time.uncertainty,
        }  # fmt: skip


Outcome = Literal[
    "recommended", "adopted", "not needed", "does not pay", "would be faster", "kept",
    "already in your setting", "left to the library", "not allowed", "not tried", "not available",
    "in the nearest", "not enough",
]  # fmt: skip


@dataclass(frozen=True)
class LeverState:
    """What became of a lever, and the `reasons`.

    `adopted` is what costs nothing, `kept` what your wish keeps, `not allowed` what changes the
    result. A lever that `would be faster` makes the recommended setting faster, and a reason says
    why it is not in it. Where nothing fits, it is `in the nearest` or `not enough`.
    """

    name: str
    effect: Effect
    says: str
    state: Outcome
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Advice:
    """What `planner advise` answers. Sizes are in bytes, times in seconds, rates in images per
    second of one device; all are predicted.

    - `rates_of`: the card whose rates order the ways.
    - `images_per_device_step`: the images of a step on one device, if every way must see as many;
      None where that was free.
    - `as_asked`: the wish as it stands.
    - `recommended`: the best way that fits; None where nothing does. The rates' uncertainty cannot
      tell some ways from the fastest: among these it fits surely, if any does, and its images of a
      step are nearest to the wish's.
    - `fastest`: the fastest way by the figures, where that is another.
    - `fastest_sure`: the fastest way whose upper end fits, where the recommended's does not.
    - `nearest`: where nothing fits, the way that needs least, which is `missing_bytes` too much.
    - `ways`: the best of each way to save memory, the recommended first and then by speed.
    - `front`: from fast to small, the fastest way for each need, in steps of 5% of the memory and
      down to 70% of the speed.
    - `waterfall`: leads from `as_asked` to `recommended` (or `nearest`).
    - `left_out`: what it did not try, and why.
    """

    computed = ("fits",)
    model: Model
    gpu: str | None
    rates_of: str
    budget_bytes: int
    images_per_device_step: int | None
    as_asked: Way
    recommended: Way | None
    fastest: Way | None
    fastest_sure: Way | None
    nearest: Way | None
    missing_bytes: int
    ways: tuple[Way, ...]
    front: tuple[Way, ...]
    waterfall: tuple[WaterfallStep, ...]
    bottleneck: Bottleneck
    levers: tuple[LeverState, ...]
    left_out: tuple[str, ...]

    def __repr__(self) -> str:
        """One line: all of it would fill a hundred pages of a notebook."""
        verdict = "recommended" if self.recommended else "nothing fits, nearest"
        best = self.recommended or self.nearest or self.as_asked
        rate = f"{best.images_per_second:.4g} {self.unit}/s predicted"
        return f"<Advice, {verdict}: {best.command!r}, {rate}>"

    @property
    def unit(self) -> str:
        """What an item of a batch is called: images, or items."""
        return self.as_asked.estimate.unit

    @property
    def fits(self) -> bool | None:
        """Whether the wish fits as it stands."""
        return self.as_asked.estimate.fits


def advise(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    link: str | None = None,
    recorded: bool = False,
    batch_size: int | None = None,
    global_batch: int | None = None,
    keep: Iterable[str] = (),
    allow: Iterable[str] = (),
    epochs: float | None = None,
    images_per_epoch: int | None = None,
    **overrides: Any,
) -> Advice:
    """The fastest ways to train `model` in a given memory, from estimates only.

    `model`, `setting`, `gpu`, `memory_bytes`, `allocator`, `link`, `epochs`, `images_per_epoch`
    and `overrides` are as `planner.estimate` takes them.

    - `batch_size` (on one device) or `global_batch` (on all): the images that an optimizer step
      must see, in micro-batches that fit; with neither it looks for the fastest batch.
    - `keep`: fields of the setting that stay as they are, or effects that are not wanted (rounding,
      recipe, learning-rate, adapters).
    - `allow`: effects that are otherwise used only where nothing else fits (recipe), or not at all
      (adapters).
    - `recorded`: tries, for minutes, also what must be recorded first, such as compilation.

    Raises UsageError for what is unknown or cannot be read, UnsupportedError for a wish that the
    model's library or the card cannot run.
    """
    target = read_target(gpu, memory_bytes, allocator, link)
    wish = read_wish(
        model, setting, target, batch_size=batch_size, global_batch=global_batch, keep=keep,
        allow=allow, overrides=overrides,
    )  # fmt: skip
    length = read_length(epochs, images_per_epoch, target.gpu)
    title = str(model) if isinstance(model, str | PathLike) else wish.model.title
    of_model = {k: v for k, v in overrides.items() if k not in TrainSetting.model_fields}
    if isinstance(model, FactoryModel):
        of_model |= _own_fields(model)
    options = allocator if isinstance(allocator, str) else None
    rounds = MAX_ROUNDS if recorded else 0
    return _Advisor(wish, title, of_model, options, length, rounds).advice()


def _own_fields(model: FactoryModel) -> dict[str, str]:
    """The fields of a factory that are not as by default, as they are typed."""
    plain = FactoryModel(factory=model.factory)
    own = ((name, value) for name, value in model if value != getattr(plain, name))
    return {name: "x".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in own}


@dataclass
class _Advisor:
    """Answers one wish."""

    wish: Wish
    title: str
    of_model: Mapping[str, Any]
    allocator: str | None
    length: TrainingLength | None
    rounds: int  # in which steps may be compiled

    def __post_init__(self) -> None:
        self.table = Table(self.wish)

    def advice(self) -> Advice:
        self.table.settle([Choice(self.wish.asked)])
        plain = self._way(Choice(self.wish.asked))
        budget = plain.estimate.budget_bytes
        assert budget is not None, "a GPU or a memory was named"
        wish, combinations, ranking = self._search(budget)
        self.table.stop_interpolating()
        self._treat(ranking)
        goal = ranking.best or ranking.nearest
        choice = goal or Choice(wish.asked)
        bottleneck = find_bottleneck(self.table, choice, choice == ranking.best)
        recommended, fastest, fastest_sure, nearest = (
            self._way(named) if named else None
            for named in (ranking.best, ranking.fastest, ranking.fastest_sure, ranking.nearest)
        )
        need = nearest.estimate.device_total_bytes if nearest else 0
        return Advice(
            model=wish.model,
            gpu=wish.target.gpu.name if wish.target.gpu else None,
            rates_of=wish.rates_of.name,
            budget_bytes=budget,
            images_per_device_step=wish.images_per_device_step,
            as_asked=plain,
            recommended=recommended,
            fastest=fastest,
            fastest_sure=fastest_sure,
            nearest=nearest,
            missing_bytes=max(0, need - budget),
            ways=tuple(map(self._way, ranking.ways)),
            front=tuple(map(self._way, ranking.front)),
            waterfall=waterfall(self.table, goal) if goal else (),
            bottleneck=bottleneck,
            levers=tuple(
                _lever_state(lever, wish, combinations, choice, bottleneck) for lever in LEVERS
            ),
            left_out=(
                *(self._optimizer_on_host(ranking.nearest) if ranking.nearest else ()),
                *what_is_left_out(wish, combinations, list(self.table.failed.values())),
            ),
        )

    def _search(self, budget_bytes: int) -> tuple[Wish, Combinations, Ranking]:
        """Ranks the combinations: without last resorts, then with them where they may be better;
        where nothing fits at all, with another recipe. Compiles what that asks for, and begins
        again."""
        wish, table = self.wish, self.table
        combinations = combine_levers(wish, table)
        ranking = rank(table, combinations.choices, budget_bytes)
        if may_need_resorts(table, combinations, ranking):
            combinations = combine_levers(wish, table, resorts=True)
            ranking = rank(table, combinations.choices, budget_bytes)
        if ranking.fastest is None and "recipe" not in wish.allow | wish.keep:
            wish = replace(wish, allow=wish.allow | {"recipe"})
            combinations = combine_levers(wish, table, resorts=True)
            ranking = rank(table, combinations.choices, budget_bytes)
        goals = [choice for choice in (ranking.best, ranking.nearest) if choice]
        if self.rounds and table.compile_steps(goals):
            self.rounds -= 1
            return self._search(budget_bytes)
        return wish, combinations, ranking

    def _treat(self, ranking: Ranking) -> None:
        """Gives the best every lever that nothing is against. The fastest, and the fastest that
        fits surely, stay beside it only where they are another choice."""
        if ranking.best is None or ranking.fastest is None:
            return
        ranking.best = best = apply_treatments(self.table, ranking.best)
        ranking.ways = [best, *(choice for choice in ranking.ways[1:] if choice != best)]
        if self.table.rate(ranking.fastest) <= self.table.rate(best):
            ranking.fastest = None
        if self.table.estimate(best).fits_surely:
            ranking.fastest_sure = None

    def _optimizer_on_host(self, nearest: Choice) -> Iterator[str]:
        """Where nothing fits: what `nearest` needs with its optimizer on the host. It is no way
        among the others, as nobody predicts its time."""
        how = "state" if nearest.setting.accumulate > 1 else "state-and-gradients"
        updates = {"offload_optimizer": how, "clip_grad": False}
        if updates.keys() & self.wish.keep:
            return
        line = (
            "an optimizer on the host, whose time is not predicted: with --set "
            f"offload_optimizer={how} --set clip_grad=false the nearest "
        )
        try:
            choice = self.wish.apply(nearest, updates)
            if self.table.has_step(choice):
                need = self.table.estimate(choice)
                fits = "fits" if need.fits_surely else "may fit" if need.fits else "does not fit"
                yield f"{line}needs {format_range(need.low_bytes, need.high_bytes)}, which {fits}"
        except PlannerError as error:
            if error.message == NOT_COMPARED:
                yield f"{line}is {NOT_COMPARED}"

    def _way(self, choice: Choice) -> Way:
        wish, estimate = self.wish, self.table.estimate(choice)
        setting = choice.setting
        if estimate.setting.optimizer == OWN_OPTIMIZER:
            setting = setting.model_copy(update={"optimizer": OWN_OPTIMIZER})
        chosen = flags(choice, self.allocator, wish)
        device = device_flags(wish.target, wish.asked.world_size)
        return Way(
            setting=setting,
            estimate=estimate.with_cost(self.length),
            changes=tuple(choice.differences(wish.asked).items()),
            effects=self._effects(choice),
            flags=chosen,
            command=command(self.title, self.of_model, device, chosen),
        )

    def _effects(self, choice: Choice) -> tuple[str, ...]:
        """What a choice changes in the result. Batch norm normalises over a micro-batch: at another
        size the model's step is another."""
        plain = self.wish.asked
        changed, eager = self.wish.effects(choice), Choice(plain.uncompiled())
        if choice.setting.batch_size == plain.batch_size or not self.table.has_step(eager):
            return changed
        if not any("batch_norm" in name for name in self.table.operation_names(eager)):
            return changed
        return ("batch norm", *(effect for effect in changed if effect != "nothing"))


def _lever_state(
    lever: Lever, wish: Wish, combinations: Combinations, choice: Choice, bottleneck: Bottleneck
) -> LeverState:
    """What became of a lever in `choice`, which is recommended or, where nothing fits, the
    nearest."""
    goes_on = bottleneck.setting_is_recommended
    refusals = [refusal for refusal in combinations.refusals if refusal.lever == lever.name]
    reasons = tuple(f"{', '.join(r.values)}: {r.reason}" for r in refusals)
    possible = wish.changes(lever, wish.sample)
    is_refused = sum(len(refusal.values) for refusal in refusals) >= len(possible)
    faster = {treatment.lever: treatment.why for treatment in bottleneck.treatments}
    state: Outcome
    if lever.effect not in wish.allow:
        option = next(name for name, effect in ALLOWED.items() if effect == lever.effect)
        state, reasons = "not allowed", (f"{EFFECTS[lever.effect]}: --allow {option}",)
    elif not possible or (lever.name == "allocator" and wish.has_expandable_segments):
        state, reasons = _state_without_change(lever, wish)
    elif wish.is_used(lever, choice):
        state = "recommended" if goes_on else "in the nearest"
        reasons = () if is_refused else reasons  # beside what the choice changes as well
    elif is_refused and {refusal.reason for refusal in refusals} == {NO_RECORDING}:
        state, reasons = "not tried", (NO_RECORDING,)
    elif is_refused:
        state = "not available"
    elif lever.name in combinations.adopted:
        state = "adopted"
    elif goes_on and lever.name in faster:
        state, reasons = "would be faster", (faster[lever.name],)
    elif lever.role in ("adopt", "either"):
        state = "does not pay"
    else:
        state = "not needed" if goes_on else "not enough"
    return LeverState(lever.name, lever.effect, lever.says, state, reasons)


def _state_without_change(lever: Lever, wish: Wish) -> tuple[Outcome, tuple[str, ...]]:
    """The state of a lever that changes nothing in this wish, and the reasons."""
    setting = wish.sample.setting
    if lever.name == "allocator" and wish.has_expandable_segments:
        return "already in your setting", ()
    if list(lever.changes(wish, setting)):
        return "kept", ()
    if lever.role == "micro-batch":
        return "not available", ("a batch of 1 has no smaller micro-batches",)
    if lever.name == "attention" and setting.attention == "library":
        return "left to the library", ("--attention eager or sdpa says which, where it has both",)
    return "already in your setting", ()


def what_is_left_out(
    wish: Wish, combinations: Combinations, failed: list[PlannerError]
) -> Iterator[str]:
    """A line for each thing that was not tried."""
    if combinations.adopted:
        yield f"ways without {', '.join(combinations.adopted)}, which cost neither memory nor time"
    if failed:
        first = failed[0].message.partition("\n")[0]
        yield f"{len(failed)} of the choices, which cannot be estimated; the first as {first}"
    if combinations.held_back:
        yield f"ways with {', '.join(combinations.held_back)}: no faster than what is recommended"
    yield (
        "max-autotune and max-autotune-no-cudagraphs: their kernels are tuned on the device; "
        "compile_scope: it changes how long compiling takes"
    )
    yield (
        "beyond checkpointing, compile and the micro-batch, changes are combined one at a time, "
        f"and only with checkpointing {' or '.join(PLAINLY_COMBINED)}"
    )
    yield "other cards: a way's command with --gpu all in place of --gpu or --memory"
    if set(wish.allow) == set(FAITHFUL):
        yield "other optimizers, pure-bf16 and fp8 (--allow recipe), adapters (--allow adapters)"
