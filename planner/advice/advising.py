"""`planner.advise`: from a wish to advice. Imports no torch, but where a model must be recorded."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from planner.advice.flags import command, device_flags, flags
from planner.advice.space import (
    NO_RECORDING,
    PLAINLY_COMBINED,
    Offered,
    Refusal,
    may_need_resorts,
    offer,
)
from planner.advice.table import Found, Table, search
from planner.advice.ways import (
    Bottleneck,
    Fall,
    bottleneck,
    treated,
    waterfall,
)
from planner.advice.wish import (
    ALLOCATOR,
    ALLOWED,
    EFFECTS,
    FAITHFUL,
    LEVERS,
    NOT_COMPARED,
    Choice,
    Effect,
    Lever,
    Updates,
    Wish,
    effects,
    read_wish,
)
from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.units import format_range
from planner.estimation.arguments import ModelLike, SettingLike
from planner.estimation.estimate import Estimate
from planner.machine.hardware.gpu import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.throughput.result import Training, read_training

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
        found = self.estimate
        names = ("unit", "is_task", "allocator", "device_total_bytes", "low_bytes", "high_bytes",
                 "fits", "fits_surely", "as_eager", "cost")  # fmt: skip
        uncertainty = found.throughput and found.throughput.uncertainty
        own = {name: value for name, value in vars(self).items() if name != "estimate"}
        return {
            **own, **{name: getattr(found, name) for name in names}, "changes": dict(self.changes),
            "images_per_second": self.images_per_second, "rate_uncertainty": uncertainty,
        }  # fmt: skip


@dataclass(frozen=True)
class LeverState:
    """What became of a lever: `recommended`, `adopted` (it costs nothing), `not needed`, `kept` (by
    your wish), `not allowed` (it changes the result), `not tried` or `not available`, then for
    `reasons`. Of one that would make the recommended faster it is why not. Where nothing fits it is
    `in the nearest` or `not enough`."""

    name: str
    effect: Effect
    says: str
    state: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Advice:
    """What `planner advise` answers. All sizes in bytes, times in seconds, rates in images per
    second of one device; predicted, nothing measured.

    `share` are the images of a step on one device that every way sees, None where that was free.
    `plain` is the wish as it stands. `recommended` is the best way that fits, None where nothing
    does; then `nearest` needs least, `missing_bytes` more than there are. Of ways that the rates'
    uncertainty cannot tell from the fastest the best fits surely, if one does, and its images of a
    step are nearest to the wish's; `fastest` is the fastest by the figures, where that is another.
    `surely` is the fastest way whose upper end fits, where the recommended's does not. `ways` are
    the best of each way to save memory, the recommended first and then by speed; `front` the way
    from fast to small, each the fastest that needs so little, in steps of 5% of the memory and down
    to 70% of the speed; `waterfall` leads from `plain` to `recommended` (or `nearest`). `rated` is
    the card whose rates order the ways. `left_out` says what was not looked at.
    """

    computed = ("fits",)
    model: Model
    gpu: str | None
    rated: str
    budget_bytes: int
    share: int | None
    plain: Way
    recommended: Way | None
    fastest: Way | None
    surely: Way | None
    nearest: Way | None
    missing_bytes: int
    ways: tuple[Way, ...]
    front: tuple[Way, ...]
    waterfall: tuple[Fall, ...]
    bottleneck: Bottleneck
    levers: tuple[LeverState, ...]
    left_out: tuple[str, ...]

    def __repr__(self) -> str:
        """In a line: all of it would fill a hundred pages of a notebook."""
        found = "recommended" if self.recommended else "nothing fits, nearest"
        best = self.recommended or self.nearest or self.plain
        rate = f"{best.images_per_second:.4g} {self.unit}/s predicted"
        return f"<Advice, {found}: {best.command!r}, {rate}>"

    @property
    def unit(self) -> str:
        """What an item of a batch is called."""
        return self.plain.estimate.unit

    @property
    def fits(self) -> bool | None:
        """Whether the wish fits as it stands."""
        return self.plain.estimate.fits


def advise(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    batch_size: int | None = None,
    global_batch: int | None = None,
    keep: Iterable[str] = (),
    allow: Iterable[str] = (),
    allocator: str | AllocatorConfig | None = None,
    link: str | None = None,
    epochs: float | None = None,
    images_per_epoch: int | None = None,
    recorded: bool = False,
    **overrides: Any,
) -> Advice:
    """The fastest ways to train `model` in a memory, from estimates alone.

    `model`, `setting`, `gpu`, `memory_bytes`, `allocator` and `overrides` are as `planner.estimate`
    takes them. `batch_size` (on one device) or `global_batch` (of all) are the images that an
    optimizer step must see, in micro-batches as they fit; with neither the fastest batch is sought.
    `keep` names fields of the setting that stay as they are, or effects that are not wanted
    (rounding, recipe, learning-rate, adapters); `allow` effects that are otherwise used only where
    nothing else fits (recipe), or not at all (adapters). `link` is what joins several GPUs
    (`world_size`), as `planner.estimate` takes it. `epochs`, of
    `images_per_epoch`, gives every way a `cost`, as there. With `recorded` steps that
    are not tried without are recorded too, which takes minutes.
    Raises UsageError for what is unknown or cannot be read, UnsupportedError for a wish that the
    model's library or the card cannot run.
    """
    wish = read_wish(
        model, setting, gpu=gpu, memory_bytes=memory_bytes, batch_size=batch_size,
        global_batch=global_batch, keep=keep, allow=allow, allocator=allocator,
        link=link, overrides=overrides,
    )  # fmt: skip
    training = read_training(epochs, images_per_epoch, wish.gpu)
    title = str(model) if isinstance(model, str | PathLike) else wish.model.title
    of_model = {k: v for k, v in overrides.items() if k not in TrainSetting.model_fields}
    if isinstance(model, FactoryModel):
        of_model |= _own_fields(model)
    options = allocator if isinstance(allocator, str) else None
    rounds = MAX_ROUNDS if recorded else 0
    return _Advising(wish, title, of_model, options, training, rounds).advice()


def _own_fields(model: FactoryModel) -> dict[str, str]:
    """What of a factory's fields is not as by default, as it is typed."""
    plain = FactoryModel(factory=model.factory)
    found = ((name, value) for name, value in model if value != getattr(plain, name))
    return {name: "x".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in found}


@dataclass
class _Advising:
    """One wish being answered."""

    wish: Wish
    title: str
    of_model: Mapping[str, Any]
    allocator: str | None
    training: Training | None
    rounds: int  # in which steps may be compiled

    def __post_init__(self) -> None:
        self.table = Table(self.wish)

    def advice(self) -> Advice:
        self.table.settle([Choice(self.wish.plain)])
        plain = self._way(Choice(self.wish.plain))
        budget = plain.estimate.budget_bytes
        assert budget is not None, "a GPU or a memory was named"
        wish, offered, found = self._search(budget)
        self.table.answer()
        self._treat(found)
        goal = found.best or found.nearest
        best = goal or Choice(wish.plain)
        nearest = self._shown(found.nearest)
        waits_for = bottleneck(self.wish, self.table, best, found.best)
        need = nearest.estimate.device_total_bytes if nearest else 0
        return Advice(
            model=wish.model,
            gpu=wish.gpu.name if wish.gpu else None,
            rated=wish.rated.name,
            budget_bytes=budget,
            share=wish.share,
            plain=plain,
            recommended=self._shown(found.best),
            fastest=self._shown(found.fastest),
            surely=self._shown(found.surely),
            nearest=nearest,
            missing_bytes=max(0, need - budget),
            ways=tuple(self._way(choice) for choice in found.ways),
            front=tuple(self._way(choice) for choice in found.front),
            waterfall=waterfall(wish, self.table, goal) if goal else (),
            bottleneck=waits_for,
            levers=tuple(_lever_states(wish, offered, best, found.best, waits_for)),
            left_out=(
                *(self._on_host(found.nearest) if found.nearest else ()),
                *what_is_left_out(wish, offered, list(self.table.failed.values())),
            ),
        )

    def _on_host(self, nearest: Choice) -> Iterator[str]:
        """Where nothing fits: what `nearest` needs with its optimizer on the host. It is no way
        among the others, as nobody predicts its time."""
        how = "state" if nearest.setting.accumulate > 1 else "state-and-gradients"
        updates = {"offload_optimizer": how, "clip_grad": False}
        if updates.keys() & self.wish.keep:
            return
        said = "an optimizer on the host, whose time is not predicted: with --set "
        said += f"offload_optimizer={how} --set clip_grad=false the nearest "
        try:
            choice = self.wish.apply(nearest, updates)
            if self.table.has_step(choice):
                found = self.table.at(choice)
                fits = "fits" if found.fits_surely else "may fit" if found.fits else "does not fit"
                yield f"{said}needs {format_range(found.low_bytes, found.high_bytes)}, which {fits}"
        except PlannerError as error:
            if error.message == NOT_COMPARED:
                yield f"{said}is {NOT_COMPARED}"

    def _search(self, budget: int) -> tuple[Wish, Offered, Found]:
        """First without last resorts, where these cannot be better; where nothing fits at all, with
        another recipe."""
        wish, table = self.wish, self.table
        offered = offer(wish, table)
        found = search(table, offered.choices, budget)
        if may_need_resorts(wish, table, offered, found):
            offered = offer(wish, table, resorts=True)
            found = search(table, offered.choices, budget)
        if found.fastest is None and "recipe" not in wish.allow | wish.keep:
            wish = wish.allowing("recipe")
            offered = offer(wish, table, resorts=True)
            found = search(table, offered.choices, budget)
        goals = [choice for choice in (found.best, found.nearest) if choice]
        if self.rounds and table.compile_steps(goals):
            self.rounds -= 1
            return self._search(budget)
        return wish, offered, found

    def _treat(self, found: Found) -> None:
        """Gives the best every lever that nothing is against; beside it stays only what it is not
        itself: the fastest, and the fastest that fits surely."""
        if found.best is None or found.fastest is None:
            return
        found.best = best = treated(self.wish, self.table, found.best)
        found.ways = [best, *(choice for choice in found.ways[1:] if choice != best)]
        if self.table.rate(found.fastest) <= self.table.rate(best):
            found.fastest = None
        if self.table.at(best).fits_surely:
            found.surely = None

    def _shown(self, choice: Choice | None) -> Way | None:
        return self._way(choice) if choice else None

    def _effects(self, setting: TrainSetting) -> tuple[str, ...]:
        """Batch norm sees a micro-batch: of another size it is another model's step."""
        plain = self.wish.plain
        found, eager = effects(setting, plain), Choice(plain.uncompiled())
        if setting.batch_size == plain.batch_size or not self.table.has_step(eager):
            return found
        names = self.table.operation_names(eager)
        if not any("batch_norm" in name for name in names):
            return found
        return ("batch norm", *(effect for effect in found if effect != "nothing"))

    def _way(self, choice: Choice) -> Way:
        wish, estimate = self.wish, self.table.at(choice)
        setting = choice.setting
        if estimate.setting.optimizer == OWN_OPTIMIZER:
            setting = setting.model_copy(update={"optimizer": OWN_OPTIMIZER})
        chosen = flags(choice, self.allocator, wish)
        changes = dict(choice.setting.differences(wish.plain))
        if choice.expandable:
            changes["allocator"] = "expandable_segments:True"
        return Way(
            setting=setting,
            estimate=estimate.with_cost(self.training),
            changes=tuple(changes.items()),
            effects=self._effects(choice.setting),
            flags=chosen,
            command=command(self.title, self.of_model, device_flags(wish), chosen),
        )


def _lever_states(
    wish: Wish, offered: Offered, best: Choice, goal: Choice | None, waits_for: Bottleneck
) -> Iterable[LeverState]:
    """`best` is what is recommended (`goal`) or, where nothing fits, the nearest."""
    faster = {treatment.lever: treatment.why for treatment in waits_for.treatments}
    changed = set(best.setting.differences(wish.plain))
    if best.expandable:
        changed.add("allocator")
    reasons: dict[str, list[Refusal]] = {}
    for refusal in offered.refusals:
        reasons.setdefault(refusal.lever, []).append(refusal)
    for lever in LEVERS:
        refused = reasons.get(lever.name, [])
        said = tuple(f"{', '.join(r.values)}: {r.reason}" for r in refused)
        possible = wish.changes(lever, wish.sample)
        is_refused = sum(len(r.values) for r in refused) >= len(possible)
        if lever.effect not in wish.allow:
            option = next(name for name, effect in ALLOWED.items() if effect == lever.effect)
            state, said = "not allowed", (f"{EFFECTS[lever.effect]}: --allow {option}",)
        elif not possible or (lever.name == "allocator" and _has_segments(wish)):
            state, said = _without_change(lever, wish)
        elif changed & set(lever.fields) and _is_used(lever, possible, best):
            state = "recommended" if goal else "in the nearest"
            said = () if is_refused else said  # beside what the recommended changes as well
        elif is_refused and {r.reason for r in refused} == {NO_RECORDING}:
            state, said = "not tried", (NO_RECORDING,)
        elif is_refused:
            state = "not available"
        elif lever.name in offered.adopted:
            state = "adopted"
        elif goal and lever.name in faster:
            state = faster[lever.name]
        else:
            unused = "not needed" if goal else "not enough"
            state = "does not pay" if lever.role in ("adopt", "either") else unused
        yield LeverState(lever.name, lever.effect, lever.says, state, said)


def _has_segments(wish: Wish) -> bool:
    return wish.allocator is not None and wish.allocator.expandable_segments


def _without_change(lever: Lever, wish: Wish) -> tuple[str, tuple[str, ...]]:
    """The state of a lever that changes nothing, and why, but where it is set."""
    setting = wish.sample.setting
    if lever.name == "allocator" and _has_segments(wish):
        return "already in your setting", ()
    if any(True for _ in lever.changes(wish.model, setting, wish.rated)):
        return "kept", ()
    if lever.role == "micro-batch":
        return "not available", ("a batch of 1 has no smaller micro-batches",)
    if lever.name == "attention" and setting.attention == "library":
        return "left to the library", ("--attention eager or sdpa says which, where it has both",)
    return "already in your setting", ()


def _is_used(lever: Lever, possible: Iterable[Updates], best: Choice) -> bool:
    """Whether one of the changes of a lever is in `best`: fields may have several levers."""
    if lever.role == "micro-batch":
        return True
    return any(
        all(best.expandable if f == ALLOCATOR else getattr(best.setting, f) == value
            for f, value in updates.items())
        for updates in possible
    )  # fmt: skip


def what_is_left_out(wish: Wish, offered: Offered, failed: list[PlannerError]) -> Iterable[str]:
    """A line for each."""
    if offered.adopted:
        yield f"ways without {', '.join(offered.adopted)}, which cost neither memory nor time"
    if failed:
        first = failed[0].message.partition("\n")[0]
        yield f"{len(failed)} of the choices, which cannot be estimated; the first as {first}"
    if offered.held_back:
        yield f"ways with {', '.join(offered.held_back)}: no faster than what is recommended"
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
