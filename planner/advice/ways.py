"""What is said beside a recommendation: from the plain default to it, lever by lever; what the
device waits for, and which lever treats it; what more GPUs like this one give.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.advice.table import Table
from planner.advice.wish import ALLOCATOR, LEVERS, Choice, Effect, Lever, Wish, effects
from planner.core.errors import PlannerError
from planner.core.schema import TrainSetting
from planner.core.schema.setting import ALONE, Parallelism
from planner.machine.hardware.gpu import peak_flops
from planner.throughput.result import Accounts, Cost, Part, Training, cost_of

FOR_SPEED = (
    "precision", "fused optimizer", "optimizer in backward", "pure bf16", "fp8", "compile"
)  # fmt: skip
WORTH = 1.01  # times as fast: what gains less is not named


@dataclass(frozen=True)
class Treatment:
    """One lever more: what it changes, the images per second with it, whether that fits, and `why`
    the step is without it."""

    lever: str
    changes: tuple[tuple[str, object], ...]
    effects: tuple[Effect, ...]
    images_per_second: float
    fits: bool | None
    why: str


@dataclass(frozen=True)
class Bottleneck(Accounts):
    """Where the seconds of a step go: its `parts` sum to `step_seconds`. `peak_share` is the
    share of the card's peak FLOP/s at which the step's matrix products run, recomputed ones
    included; `model_share` counts only those that the model needs (model FLOP utilisation)."""

    computed = (*Accounts.computed, "largest")
    setting_is_recommended: bool
    step_seconds: float
    parts: tuple[Part, ...]
    peak_share: float | None
    model_share: float | None
    treatments: tuple[Treatment, ...]

    @property
    def whose(self) -> str:
        """Whose seconds these are, in words."""
        return "the recommended step" if self.setting_is_recommended else "the step"

    @property
    def largest(self) -> str:
        """What takes most of the step."""
        seconds = self.bound_seconds
        return max(seconds, key=seconds.__getitem__)


def bottleneck(wish: Wish, table: Table, choice: Choice, goal: Choice | None) -> Bottleneck:
    """Of `choice`, which is `goal` where there is one."""
    time = table.at(choice).throughput
    assert time is not None, "there are rates"
    model_share = None
    peak = peak_flops(wish.gpu, choice.setting.precision) if wish.gpu else None
    if peak is not None:
        # Without what checkpointing computes again.
        plain = choice.setting.model_copy(update={"checkpointing": "none", "offload": "none"})
        flops = table.matrix_flops(Choice(plain, choice.expandable))
        model_share = flops / time.step_seconds / peak
    return Bottleneck(
        setting_is_recommended=choice == goal,
        step_seconds=time.step_seconds,
        parts=time.parts,
        peak_share=time.peak_share,
        model_share=model_share,
        treatments=tuple(t for _, t in _treatments(wish, table, choice)),
    )


def treated(wish: Wish, table: Table, choice: Choice) -> Choice:
    """A choice that fits, with every lever that makes it faster, is allowed and fits as surely: the
    search combines few."""
    while True:
        found = (changed for changed, treatment in _treatments(wish, table, choice)
                 if not treatment.why)  # fmt: skip
        better = next(found, None)
        if better is None:
            return choice
        choice = better


def _treatments(wish: Wish, table: Table, choice: Choice) -> list[tuple[Choice, Treatment]]:
    """Single changes of any lever that make `choice` faster, the fastest first; one each, rather
    one that nothing is against."""
    best: dict[str, tuple[Choice, Treatment]] = {}
    rate = table.rate(choice)
    for lever in LEVERS:
        for changed, updates in _changed(wish, table, choice, lever):
            faster = table.rate(changed)
            if faster < rate * WORTH:
                continue
            found = Treatment(
                lever.name,
                updates,
                effects(changed.setting, wish.plain),
                faster,
                bool(table.at(changed).fits),
                _why_not(wish, table, choice, changed, lever),
            )
            known = best.get(lever.name)
            if known is None or _rank(found) > _rank(known[1]):
                best[lever.name] = changed, found
    return sorted(best.values(), key=lambda pair: -pair[1].images_per_second)


def _rank(treatment: Treatment) -> tuple[bool, float]:
    return not treatment.why, treatment.images_per_second


def _why_not(wish: Wish, table: Table, choice: Choice, changed: Choice, lever: Lever) -> str:
    """Why `choice` is recommended and not what `lever` makes of it; empty where nothing is against
    it. What the choice changes already is no reason."""
    if not table.at(changed).fits:
        return "does not fit"
    if table.at(choice).fits_surely and not table.at(changed).fits_surely:
        return "may not fit"
    if lever.effect in wish.allow:
        return ""
    known = lever.effect in effects(choice.setting, wish.plain)
    return f"changes {lever.effect}{' further' if known else ''}"


def _changed(
    wish: Wish, table: Table, choice: Choice, lever: Lever
) -> Iterable[tuple[Choice, tuple[tuple[str, object], ...]]]:
    """What one more lever makes of a choice; only those that are for speed."""
    if lever.name not in FOR_SPEED:
        return
    for updates in wish.changes(lever, choice):
        with suppress(PlannerError):
            changed = wish.apply(choice, updates)
            if table.has_step(changed):
                yield changed, tuple(updates.items())


# What a person changes so that a step fits; a second GPU may do instead.
_FOR_MEMORY = frozenset(
    ("accumulate", "checkpointing", "offload", "optimizer_in_backward", "activation_memory_budget")
)


@dataclass(frozen=True)
class MoreGpus:
    """The wish as it stands, on other GPUs: `gpus` in all, `batch_size` images on each, by
    `parallelism` over `link`. Bytes are of one GPU, images per second of all; where one GPU's share
    of the images does not fit even by itself, the bytes are what it needs at least, and the rate is
    None. `in_place_of` are the changes for memory that the recommendation makes and this does
    without, where the wish does not fit as it stands."""

    gpus: int
    parallelism: Parallelism
    link: str | None
    batch_size: int
    device_total_bytes: int
    fits: bool
    images_per_second: float | None = None
    in_place_of: tuple[tuple[str, object], ...] = ()
    cost: Cost | None = None


def more_gpus(
    wish: Wish, table: Table, goal: Choice | None, training: Training | None = None
) -> tuple[MoreGpus, ...]:
    """Twice the GPUs of the wish, and its own with sharded weights. Empty where the link between
    them is not known, or a step of theirs is not on shapes."""
    if wish.gpu is None:
        return ()
    found = []
    alone = table.at(Choice(wish.plain))
    for changes in _changes(wish):
        try:
            setting = TrainSetting.model_validate({**wish.plain.model_dump(), **changes})
            least = _least_bytes_alone(table, setting)
            if least > (alone.budget_bytes or 0):
                gpus, kind, batch = setting.world_size, setting.parallelism, setting.batch_size
                found.append(MoreGpus(gpus, kind, wish.link, batch, least, fits=False))
                continue
            there = Table(replace(wish, plain=setting), table)
            one = _on(there, setting, wish, None if alone.fits else goal, training)
        except (PlannerError, ValueError):  # an unknown link, a kind that no such step has
            continue
        found += [one] if one is not None else []
    return tuple(found)


def _least_bytes_alone(table: Table, setting: TrainSetting) -> int:
    """What one GPU needs at least for its share of the images where each has a whole copy of the
    model: what one needs without the others. 0 where that is not so."""
    one = Choice(setting.model_copy(update=ALONE))
    if setting.parallelism != "ddp" or not table.has_step(one):
        return 0
    return table.least_bytes(one)


def _changes(wish: Wish) -> Iterator[dict[str, object]]:
    plain = wish.plain
    kind: Parallelism = "ddp" if plain.parallelism == "none" else plain.parallelism
    batch = plain.batch_size
    if wish.share is not None and batch % 2 == 0:  # the images of a step stay
        batch //= 2
    yield {"world_size": 2 * plain.world_size, "parallelism": kind, "batch_size": batch}
    if plain.parallelism == "ddp" and plain.world_size > 1:
        fields = TrainSetting.model_fields.items()
        plain_ddp = {name: info.default for name, info in fields if name.startswith("ddp_")}
        yield {"parallelism": "fsdp", **plain_ddp}


def _on(
    there: Table,
    setting: TrainSetting,
    wish: Wish,
    goal: Choice | None,
    training: Training | None,
) -> MoreGpus | None:
    choice = Choice(setting)
    if not there.has_step(choice):
        return None
    found = there.at(choice)
    predicted = found.throughput
    if predicted is None or predicted.communication is None:
        return None
    replaced: tuple[tuple[str, object], ...] = ()
    if found.fits and goal is not None:
        changed = goal.setting.differences(wish.plain).items()
        replaced = tuple((field, value) for field, value in changed if field in _FOR_MEMORY)
    return MoreGpus(
        gpus=setting.world_size,
        parallelism=setting.parallelism,
        link=predicted.communication.link,
        batch_size=setting.batch_size,
        device_total_bytes=found.device_total_bytes,
        fits=bool(found.fits),
        images_per_second=predicted.all_images_per_second,
        in_place_of=replaced,
        cost=cost_of(training, predicted),
    )


@dataclass(frozen=True)
class Fall:
    """One lever on the way. `num_bytes` is what the device needs with it and all before it,
    `saved_bytes` how much less that is than before it; `seconds` is what the images of the wish's
    step take then, `added_seconds` how much more than before. `levers` are several where one of
    them cannot be without the other."""

    levers: tuple[str, ...]
    changes: tuple[tuple[str, object], ...]
    num_bytes: int
    saved_bytes: int
    seconds: float
    added_seconds: float
    low_bytes: int
    high_bytes: int
    as_eager: bool


def waterfall(wish: Wish, table: Table, goal: Choice) -> tuple[Fall, ...]:
    """The levers in which `goal` is not the wish, in the order of `LEVERS`. What they save adds up
    to the difference of the two, in bytes and in seconds."""
    falls: list[Fall] = []
    here = Choice(wish.plain)
    before = _cost(wish, table, here)
    names: list[str] = []
    changes: list[tuple[str, object]] = []
    done: set[str] = set()
    for lever in LEVERS:
        fields = [f for f in lever.fields if f not in done]
        after, changed = _towards(here, goal, fields)
        if not changed:
            continue
        done |= {field for field, _ in changed}
        names.append(lever.name)
        changes += changed
        here = after
        if not _runs(wish, here):
            continue
        cost = _cost(wish, table, here)
        saved, added = before[0] - cost[0], cost[1] - before[1]
        there = table.at(here)
        between = there.low_bytes, there.high_bytes, there.as_eager
        falls.append(Fall(tuple(names), tuple(changes), cost[0], saved, cost[1], added, *between))
        before, names, changes = cost, [], []
    assert here == goal, "every field of a goal belongs to a lever"
    return tuple(falls)


def _towards(
    here: Choice, goal: Choice, fields: list[str]
) -> tuple[Choice, list[tuple[str, object]]]:
    """`here` with these fields as `goal` has them, and what that changes."""
    changed = [
        (field, getattr(goal.setting, field))
        for field in fields
        if field != ALLOCATOR and getattr(here.setting, field) != getattr(goal.setting, field)
    ]
    expandable = goal.expandable if ALLOCATOR in fields else here.expandable
    said: list[tuple[str, object]] = list(changed)
    if expandable != here.expandable:
        said.append((ALLOCATOR, "expandable_segments:True"))
    return Choice(here.setting.model_copy(update=dict(changed)), expandable), said


def _runs(wish: Wish, choice: Choice) -> bool:
    try:
        wish.apply(choice, {})
    except PlannerError:
        return False
    return True


def _cost(wish: Wish, table: Table, choice: Choice) -> tuple[int, float]:
    images = wish.plain.batch_size * wish.plain.accumulate
    return table.at(choice).device_total_bytes, images / table.rate(choice)
