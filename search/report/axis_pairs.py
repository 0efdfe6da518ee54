"""Settings that ran, and the pairs of them that differ in one axis only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from planner.schema import MeasurementRecord, TrainSetting
from search.axes import AXES, in_order

BATCH, ACCUMULATE = "batch_size", "accumulate"
FIELDS = in_order((BATCH, *AXES, *TrainSetting.model_fields))
Value = Any  # of a field of a setting


@dataclass(frozen=True)
class Ran:
    """A setting that ran: images/s, the median of its probes, and the most bytes that one took."""

    setting: TrainSetting
    rate: float
    num_bytes: int | None


@dataclass(frozen=True)
class Factor:
    """Of several pairs, what one value has of what the other has: the least, median and most."""

    least: float
    median: float
    most: float
    num_pairs: int


@dataclass(frozen=True)
class Effect:
    """What `value` of an axis gave. `against` is the value it is compared with, None where no
    setting ran with both; `rate` and `memory` are factors over the pairs. `best` is the fastest
    setting that ran with the value; `num_probed` settings had it, `num_ran` of them ran."""

    axis: str
    value: Value
    num_probed: int
    num_ran: int
    best: Ran | None
    against: Value | None = None
    rate: Factor | None = None
    memory: Factor | None = None


def ran_settings(records: Sequence[MeasurementRecord]) -> list[Ran]:
    """Each setting that was measured, once."""
    grouped: dict[TrainSetting, list[MeasurementRecord]] = {}
    for record in records:
        if record.status == "measured" and record.images_per_second:
            grouped.setdefault(record.setting, []).append(record)
    return [
        Ran(
            setting,
            median([r.images_per_second for r in found if r.images_per_second]),
            max((n for r in found if (n := r.used_bytes)), default=None),
        )
        for setting, found in grouped.items()
    ]


def varied_axes(settings: Sequence[TrainSetting]) -> list[str]:
    """The fields in which settings differ, the batch first. Accumulation that only keeps the global
    batch what it is goes with the batch."""
    axes = [f for f in FIELDS if len({getattr(s, f) for s in settings}) > 1]
    global_batches = {s.batch_size * s.accumulate for s in settings}
    if BATCH in axes and ACCUMULATE in axes and len(global_batches) == 1:
        axes.remove(ACCUMULATE)
    return axes


def effects_of(
    axis: str, axes: Sequence[str], probed: Sequence[TrainSetting], ran: Sequence[Ran]
) -> list[Effect]:
    """What each value of an axis gave, in the order of values.

    A batch is compared with the next smaller one; any other value with the default, or with the
    one that has most settings in common with the rest.
    """
    others = [a for a in axes if a != axis]
    by_value: dict[Value, dict[tuple[Value, ...], Ran]] = {}
    for one in ran:
        rest = tuple(getattr(one.setting, a) for a in others)
        by_value.setdefault(getattr(one.setting, axis), {})[rest] = one
    values = sorted({getattr(s, axis) for s in probed}, key=_by_size)
    if axis != BATCH:
        values = list(in_order(getattr(s, axis) for s in probed))
    num_probed = Counter(getattr(s, axis) for s in probed)
    reference = None if axis == BATCH else _reference(axis, values, by_value)
    return [
        _effect(axis, value, num_probed[value], by_value, against)
        for at, value in enumerate(values)
        for against in [(values[at - 1] if at else None) if axis == BATCH else reference]
    ]


def _by_size(value: Value) -> tuple[bool, Value]:
    return isinstance(value, str), value


def _reference(
    axis: str, values: Sequence[Value], by_value: dict[Value, dict[tuple[Value, ...], Ran]]
) -> Value:
    """The value that shares most settings with the others, and the default where it shares half as
    many."""

    num_values = Counter(rest for ran in by_value.values() for rest in ran)

    def shared(value: Value) -> int:
        return sum(num_values[rest] - 1 for rest in by_value.get(value, {}))

    most = max(values, key=shared)
    default = TrainSetting.model_fields[axis].default
    return default if default in values and 2 * shared(default) >= shared(most) else most


def _effect(
    axis: str, value: Value, num_probed: int,
    by_value: dict[Value, dict[tuple[Value, ...], Ran]], against: Value | None,
) -> Effect:  # fmt: skip
    own, theirs = by_value.get(value, {}), by_value.get(against, {})
    best = max(own.values(), key=lambda r: r.rate, default=None)
    plain = Effect(axis, value, num_probed, len(own), best)
    if against is None or against == value:
        return plain
    pairs = [(own[rest], theirs[rest]) for rest in own.keys() & theirs.keys()]
    if not pairs:
        return plain
    sizes = [a.num_bytes / b.num_bytes for a, b in pairs if a.num_bytes and b.num_bytes]
    return Effect(
        axis, value, num_probed, len(own), best, against,
        _factor([a.rate / b.rate for a, b in pairs]), _factor(sizes) if sizes else None,
    )  # fmt: skip


def _factor(ratios: Sequence[float]) -> Factor:
    return Factor(min(ratios), median(ratios), max(ratios), len(ratios))
