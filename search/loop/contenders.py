"""The settings that ran within the budget, and which of them is best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.space import candidate, setting_id, simplicity
from search.probe.evidence import (
    is_feasible,
    price_of_compiling,
    rate_interval,
    usual,
    usually_slowed_by,
    was_throttled,
)

RanT = TypeVar("RanT", bound="Ran")


@dataclass(frozen=True)
class Ran:
    """A setting with all its measured probes. Rates in images/s, times in seconds."""

    setting: TrainSetting
    records: tuple[MeasurementRecord, ...]

    @property
    def images(self) -> int:
        """In one sample."""
        return self.setting.batch_size

    @property
    def judged(self) -> Sequence[MeasurementRecord]:
        return self.records

    @property
    def samples(self) -> list[float]:
        return [s for record in self.judged for s in record.samples]

    @property
    def measured_rate(self) -> float:
        return self.images / median(self.samples)

    @property
    def rate(self) -> float:
        """By which settings are compared."""
        return self.measured_rate

    @property
    def interval(self) -> tuple[float, float]:
        return rate_interval(self.images, self.samples)

    @property
    def evidence(self) -> MeasurementRecord:
        """The one record that stands for it: of several the last, which found most of what it read
        in the page cache, with all their samples."""
        return self.together(self.records[-1])

    def together(self, record: MeasurementRecord) -> MeasurementRecord:
        """`record` with the samples and the flags of all that are judged."""
        records = self.judged
        if len(records) == 1:
            return record
        flags = tuple(dict.fromkeys(f for r in records for f in r.flags))
        whole = record.with_samples(tuple(self.samples))
        joined = (*flags, f"{len(records)} probes together")
        return whole.model_copy(update={"images_per_second": self.measured_rate, "flags": joined})


@dataclass(frozen=True)
class Contender(Ran):
    """A setting of a step. Rates are per device, of the probes on it as it usually runs (`is_hot`:
    throttled), where there are such. It is the slower the hotter it gets: where `slower` says how
    many times as long each record's steps took for that, rates are those at one heat."""

    is_hot: bool = False
    slower: tuple[float, ...] = ()

    @property
    def is_comparable(self) -> bool:
        """Not so where the device was cool as it never is for long: others had it warm."""
        return not self.is_hot or bool(self.slower) or any(map(was_throttled, self.records))

    @property
    def rate(self) -> float:
        if not self.slower:
            return self.measured_rate
        pairs = zip(self.records, self.slower, strict=True)
        return self.images / median([s / slower for r, slower in pairs for s in r.samples])

    @property
    def interval(self) -> tuple[float, float]:
        """As wide as the samples make it."""
        low, high = super().interval
        moved = self.rate / self.measured_rate
        return low * moved, high * moved

    @property
    def images(self) -> int:
        return self.setting.batch_size * self.setting.accumulate

    @property
    def judged(self) -> list[MeasurementRecord]:
        return usual(self.records, self.is_hot)

    @property
    def step_seconds(self) -> float:
        return median(self.samples)

    @property
    def compile_seconds(self) -> float:
        return price_of_compiling(self.records)

    @property
    def num_bytes(self) -> int | None:
        known = [n for r in self.records if (n := r.used_bytes) is not None]
        return max(known, default=None)

    @property
    def evidence(self) -> MeasurementRecord:
        found = self.together(self.judged[0])
        if len(self.judged) == 1:
            return found
        compiling = self.compile_seconds if found.compile_seconds else None
        return found.model_copy(update={"compile_seconds": compiling})

    def rate_over(self, images: float | None) -> float:
        """Images/s over so many of this device, compilation included; of the steps alone for
        None."""
        return self.rate if images is None else images / self.total_seconds(images)

    def total_seconds(self, images: float) -> float:
        """Seconds to train on so many images of this device, compilation included."""
        return self.compile_seconds + images / self.rate


def contenders(records: Iterable[MeasurementRecord], budget_bytes: int | None) -> list[Contender]:
    """The settings that ran within the budget, those that can be compared first, fastest first; one
    that failed once is none."""
    records = list(records)
    is_hot = usually_slowed_by(records) == "heat"
    found = [Contender(g[0].setting, g, is_hot) for g in groups_that_ran(records, budget_bytes)]
    return ranked(found)


def ranked(found: Iterable[Contender]) -> list[Contender]:
    """Those that can be compared first, fastest first."""
    return sorted(found, key=lambda c: (not c.is_comparable, -c.rate))


def groups_that_ran(
    records: Iterable[MeasurementRecord], budget_bytes: int | None
) -> Iterator[tuple[MeasurementRecord, ...]]:
    """The probes of each setting, where all of them ran within the budget."""
    grouped: dict[str, list[MeasurementRecord]] = {}
    for record in records:
        if not record.inconclusive:
            grouped.setdefault(setting_id(record.setting), []).append(record)
    for group in grouped.values():
        if all(is_feasible(r, budget_bytes) for r in group):
            yield tuple(group)


# Noise lets a plainer setting win, but only where its median is slower by no more than this: with
# few or disturbed samples an interval can be so wide that everything would be level.
SIMPLER_COSTS = 0.01


def choose(found: Sequence[Contender], images: float | None = None) -> Contender:
    """The fastest, or where others cannot be told from it the plainest of them.

    With `images` (of one device, a whole training's) it is the least total time that wins,
    compilation included; compile time does not average out, so noise is that of the rates alone.
    """
    found = [c for c in found if c.is_comparable] or found
    if images is None:
        level = level_with_best(found)
    else:
        best = min(found, key=lambda c: c.total_seconds(images))
        latest = best.compile_seconds + images / best.interval[0]
        level = [
            c
            for c in found
            if c.compile_seconds + images / c.interval[1] <= latest
            and c.total_seconds(images) <= best.total_seconds(images) / (1 - SIMPLER_COSTS)
        ]
    return min(level, key=lambda c: simplicity(c.setting))


def level_with_best(found: Sequence[RanT]) -> list[RanT]:
    """Those that cannot be told from the fastest."""
    best = max(found, key=lambda c: c.rate)
    floor = best.rate * (1 - SIMPLER_COSTS)
    return [c for c in found if c.interval[1] >= best.interval[0] and c.rate >= floor]


def pareto_front(found: Iterable[Contender]) -> list[Contender]:
    """The front of throughput against memory: nothing else is both faster and smaller.
    Least memory first."""
    kept: list[Contender] = []
    for c in sorted(found, key=lambda c: (c.num_bytes or 0, -c.rate)):
        if not kept or c.rate > kept[-1].rate:
            kept.append(c)
    return kept


def find_plain_default(found: Iterable[Contender], arm: str) -> Contender | None:
    """The plain default (the settings of `arm`) at the largest batch that was measured to fit."""
    plain = [c for c in found if candidate(c.setting).arm == arm]
    return max(plain, key=lambda c: c.setting.batch_size, default=None)


def break_even_steps(compiled: Contender, eager: Contender) -> int | None:
    """Optimizer steps after which compilation has paid for itself; None if it never does."""
    per_image = 1 / eager.rate - 1 / compiled.rate
    if per_image <= 0:
        return None
    return max(1, round(compiled.compile_seconds / (per_image * compiled.images)))
