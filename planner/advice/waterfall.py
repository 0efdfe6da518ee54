"""What an answer shows beside a recommendation: the way from the setting asked for to it, lever by
lever; what the device waits for, and which lever treats that.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from planner.advice.table import Table
from planner.advice.wish import LEVERS, Choice, Effect, Lever, Updates
from planner.core.errors import PlannerError
from planner.machine.hardware.gpu import peak_flops
from planner.throughput.result import Breakdown, Part

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
class Bottleneck(Breakdown):
    """Where the seconds of a step go: its `parts` sum to `step_seconds`. `peak_share` is the
    share of the card's peak FLOP/s at which the step's matrix products run, recomputed ones
    included; `model_share` counts only those that the model needs (model FLOP utilisation)."""

    computed = (*Breakdown.computed, "largest")
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


def find_bottleneck(table: Table, choice: Choice, is_recommended: bool) -> Bottleneck:
    """What the step of `choice` waits for, and what would treat it."""
    time = table.estimate(choice).throughput
    assert time is not None, "there are rates"
    model_share, gpu = None, table.wish.target.gpu
    peak = peak_flops(gpu, choice.setting.precision) if gpu else None
    if peak is not None:
        without_recomputation = choice.updated({"checkpointing": "none", "offload": "none"})
        model_share = table.matrix_flops(without_recomputation) / time.step_seconds / peak
    return Bottleneck(
        setting_is_recommended=is_recommended,
        step_seconds=time.step_seconds,
        parts=time.parts,
        peak_share=time.peak_share,
        model_share=model_share,
        treatments=tuple(t for _, t in _find_treatments(table, choice)),
    )


def apply_treatments(table: Table, choice: Choice) -> Choice:
    """A choice that fits, with every lever that makes it faster, is allowed and fits as surely: a
    ranking looks at few combinations."""
    while True:
        treatments = _find_treatments(table, choice)
        better = next((changed for changed, treatment in treatments if not treatment.why), None)
        if better is None:
            return choice
        choice = better


def _find_treatments(table: Table, choice: Choice) -> Sequence[tuple[Choice, Treatment]]:
    """The best single change of each lever that makes `choice` faster, the fastest first. Of one
    lever, a change with nothing against it is better than a faster one."""
    best: dict[str, tuple[Choice, Treatment]] = {}
    rate = table.rate(choice)
    for lever in LEVERS:
        for changed, updates in _speed_changes(table, choice, lever):
            faster = table.rate(changed)
            if faster < rate * WORTH:
                continue
            treatment = Treatment(
                lever.name,
                tuple(updates.items()),
                table.wish.effects(changed),
                faster,
                bool(table.estimate(changed).fits),
                _reason_against(table, choice, changed, lever),
            )
            if lever.name not in best or _merit(treatment) > _merit(best[lever.name][1]):
                best[lever.name] = changed, treatment
    return sorted(best.values(), key=lambda pair: -pair[1].images_per_second)


def _merit(treatment: Treatment) -> tuple[bool, float]:
    return not treatment.why, treatment.images_per_second


def _reason_against(table: Table, choice: Choice, changed: Choice, lever: Lever) -> str:
    """Why `choice` is recommended and not what `lever` makes of it; "" where nothing is against
    it. An effect that the choice has already is no reason."""
    if not table.estimate(changed).fits:
        return "does not fit"
    if table.estimate(choice).fits_surely and not table.estimate(changed).fits_surely:
        return "may not fit"
    if lever.effect in table.wish.allow:
        return ""
    has_effect = lever.effect in table.wish.effects(choice)
    return f"changes {lever.effect}{' further' if has_effect else ''}"


def _speed_changes(table: Table, choice: Choice, lever: Lever) -> Iterator[tuple[Choice, Updates]]:
    """What a lever for speed makes of a choice; nothing of any other lever."""
    for updates in table.wish.changes(lever, choice) if lever.is_for_speed else ():
        with suppress(PlannerError):
            changed = table.wish.apply(choice, updates)
            if table.has_step(changed):
                yield changed, updates


@dataclass(frozen=True)
class WaterfallStep:
    """One lever on the way from the wish to the recommendation.

    `num_bytes` is what the device needs with it and all levers before it, `saved_bytes` how much
    less that is than before; `seconds` is what the images of the wish's step take then,
    `added_seconds` how much more than before. `levers` are several where a setting with only one
    of them cannot run.
    """

    levers: tuple[str, ...]
    changes: tuple[tuple[str, object], ...]
    num_bytes: int
    saved_bytes: int
    seconds: float
    added_seconds: float
    low_bytes: int
    high_bytes: int
    as_eager: bool


def waterfall(table: Table, goal: Choice) -> tuple[WaterfallStep, ...]:
    """The levers in which `goal` is not the wish, in the order of `LEVERS`. What they save adds up
    to the difference of the two, in bytes and in seconds."""
    steps: list[WaterfallStep] = []
    choice = Choice(table.wish.asked)
    num_bytes, seconds = _bytes_and_seconds(table, choice)
    levers: list[str] = []
    changes: dict[str, object] = {}  # of levers that cannot run without the next
    done: set[str] = set()
    for lever in LEVERS:
        updates = {
            field: goal.value(field)
            for field in lever.fields
            if field not in done and goal.value(field) != choice.value(field)
        }
        if not updates:
            continue
        done |= updates.keys()
        levers.append(lever.name)
        changes |= updates
        choice = choice.updated(updates)
        try:
            table.wish.apply(choice, {})
        except PlannerError:  # it cannot run without the next lever
            continue
        now_bytes, now_seconds = _bytes_and_seconds(table, choice)
        estimate = table.estimate(choice)
        steps.append(
            WaterfallStep(
                tuple(levers), tuple(changes.items()),
                now_bytes, num_bytes - now_bytes, now_seconds, now_seconds - seconds,
                estimate.low_bytes, estimate.high_bytes, estimate.as_eager,
            )
        )  # fmt: skip
        num_bytes, seconds, levers, changes = now_bytes, now_seconds, [], {}
    assert choice == goal, "every field of a goal belongs to a lever"
    return tuple(steps)


def _bytes_and_seconds(table: Table, choice: Choice) -> tuple[int, float]:
    """The device's bytes, and the seconds that the images of the wish's step take."""
    plain = table.wish.asked
    images = plain.images_per_device_step
    return table.estimate(choice).device_total_bytes, images / table.rate(choice)
