"""What is said beside a recommendation: from the plain default to it, lever by lever; what the
device waits for, and which lever treats it; what more GPUs like this one, or larger cards, give.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from planner.advice.table import Table
from planner.advice.wish import ALLOCATOR, LEVERS, Choice, Effect, Lever, Wish, effects
from planner.core.errors import PlannerError
from planner.core.schema import TrainSetting
from planner.core.schema.setting import ALONE, Parallelism
from planner.machine.hardware.gpu import Gpu, all_gpus, lacks, peak_flops
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


MAX_CARDS = 4
LARGER = 1.05  # times the memory: what a driver keeps for itself differs by less


@dataclass(frozen=True)
class Card:
    """A card of the catalogue. `plain_fits` and `plain_rate` (images/s) are of the
    wish as it stands; `rate` and `fits` of the recommendation, None where there is none."""

    name: str
    title: str
    memory_bytes: int
    plain_fits: bool
    plain_rate: float
    fits: bool | None
    rate: float | None


def larger_cards(wish: Wish, table: Table, goal: Choice | None, budget: int) -> tuple[Card, ...]:
    """The next cards with more memory: of each size the fastest, up to the first in which the wish
    fits as it stands, and the fastest of all above it."""
    wanted = [wish.plain.precision, *([goal.setting.precision] if goal else [])]
    known = [g for g in all_gpus() if not any(lacks(g, precision) for precision in wanted)]
    found: list[Table] = []
    for gpu in _next(known, wish.plain.precision, budget):
        found.append(Table(replace(wish, gpu=gpu, memory_bytes=None), table))
        if len(found) >= 2 and _fits(found[-1], Choice(wish.plain), table):
            break
    shown = found[: MAX_CARDS - 1] + found[-1:] if len(found) > MAX_CARDS else found
    return tuple(_card(there, goal, table) for there in shown)


def _next(gpus: Iterable[Gpu], precision: str, budget: int) -> Iterable[Gpu]:
    """Of each larger memory the fastest card, unless a smaller one is as fast."""

    def size(gpu: Gpu) -> int:
        return round(gpu.memory_bytes / budget / 0.1)

    larger = [gpu for gpu in gpus if gpu.memory_bytes > LARGER * budget]
    larger.sort(key=lambda gpu: (size(gpu), -(peak_flops(gpu, precision) or 0.0)))
    for _, same in groupby(larger, size):
        yield next(same)


def _card(there: Table, goal: Choice | None, here: Table) -> Card:
    gpu, plain = there.wish.gpu, Choice(there.wish.plain)
    assert gpu is not None, "a card was named"
    return Card(
        name=gpu.name,
        title=gpu.title,
        memory_bytes=gpu.memory_bytes,
        plain_fits=_fits(there, plain, here),
        plain_rate=there.rate(plain),
        fits=_fits(there, goal, here) if goal else None,
        rate=there.rate(goal) if goal else None,
    )


def _fits(there: Table, choice: Choice, here: Table) -> bool:
    """What a choice needs differs from card to card by the context and by kernels' scratch alone:
    only where a card is about as large as what is needed here is the allocator replayed."""
    assert there.wish.gpu is not None, "a card was named"
    memory, need = there.wish.gpu.memory_bytes, here.at(choice).device_total_bytes
    if memory > LARGER * need or need > LARGER * memory:
        return memory > need
    return bool(there.at(choice).fits)


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
