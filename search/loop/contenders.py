"""The settings that ran within the budget, and which of them is best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

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


@dataclass(frozen=True)
class Contender:
    """A setting with all its measured probes. Rates are images/s of one device, of the probes on it
    as it usually runs (`is_hot`: throttled), where there are such; times are in seconds. It is the
    slower the hotter it gets: where `slower` says how many times as long each record's steps took
    for that, rates are those at one heat."""

    setting: TrainSetting
    records: tuple[MeasurementRecord, ...]
    is_hot: bool = False
    slower: tuple[float, ...] = ()

    @property
    def images(self) -> int:
        """In one optimizer step."""
        return self.setting.batch_size * self.setting.accumulate

    @property
    def judged(self) -> list[MeasurementRecord]:
        return usual(self.records, self.is_hot)

    @property
    def samples(self) -> list[float]:
        return [s for record in self.judged for s in record.samples]

    @property
    def measured_rate(self) -> float:
        return self.images / median(self.samples)

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
        low, high = rate_interval(self.images, self.samples)
        moved = self.rate / self.measured_rate
        return low * moved, high * moved

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
        """The one record that stands for it: the first, with the samples and flags of all that are
        judged."""
        first, *others = self.judged
        if not others:
            return first
        flags = tuple(dict.fromkeys(f for r in self.judged for f in r.flags))
        return first.with_samples(tuple(self.samples)).model_copy(
            update={
                "images_per_second": self.measured_rate,
                "flags": (*flags, f"{len(self.judged)} probes together"),
                "compile_seconds": self.compile_seconds if first.compile_seconds else None,
            }
        )

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


# Of the best rate, that a simpler setting may cost to be worth a note: a judgement.
SIMPLER_COSTS = 0.01


def choose(found: Sequence[Contender], images: float | None = None) -> Contender:
    """The fastest; with `images` (of one device, a whole training's) that of the least total time,
    compilation included."""
    return max(comparable(found), key=lambda c: c.rate_over(images))


def comparable(found: Sequence[Contender]) -> Sequence[Contender]:
    """Without those of a device that was cool as it never is for long, where there are others."""
    return [c for c in found if c.is_comparable] or found


def simplest_beside(best: Contender, found: Sequence[Contender]) -> Contender | None:
    """The simplest that is at most 1% slower than the best; None where that is the best itself."""
    level = [c for c in comparable(found) if c.rate >= best.rate * (1 - SIMPLER_COSTS)]
    simplest = min(level, key=lambda c: simplicity(c.setting))
    return None if simplicity(simplest.setting)[:-2] >= simplicity(best.setting)[:-2] else simplest


def pareto_front(found: Iterable[Contender]) -> list[Contender]:
    """The front of throughput against memory: nothing else is both faster and smaller.
    Least memory first."""
    kept: list[Contender] = []
    for c in sorted(found, key=lambda c: (c.num_bytes or 0, -c.rate)):
        if not kept or c.rate > kept[-1].rate:
            kept.append(c)
    return kept


def find_plain_default(found: Iterable[Contender], arm: str) -> Contender | None:
    """The plain default (the settings of `arm`) at the fastest batch that was measured to fit."""
    plain = [c for c in found if candidate(c.setting).arm == arm]
    return max(plain, key=lambda c: c.rate, default=None)


def break_even_steps(compiled: Contender, eager: Contender) -> int | None:
    """Optimizer steps after which compilation has paid for itself; None if it never does."""
    per_image = 1 / eager.rate - 1 / compiled.rate
    if per_image <= 0:
        return None
    return max(1, round(compiled.compile_seconds / (per_image * compiled.images)))
