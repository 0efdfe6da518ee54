"""What the device waits for in a step, and which lever treats it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from planner.advice.levers import LEVERS, Effect, Lever, effects
from planner.advice.table import Table
from planner.advice.wish import Choice, Wish
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
