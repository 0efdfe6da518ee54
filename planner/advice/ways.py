"""What is said beside a recommendation: from the plain default to it, lever by lever; what the
device waits for, and which lever treats it.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from planner.advice.table import Table
from planner.advice.wish import ALLOCATOR, LEVERS, Choice, Effect, Lever, Wish, effects
from planner.core.errors import PlannerError
from planner.machine.hardware.gpu import peak_flops
from planner.throughput.result import Accounts, Part

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
