"""A setting that ran within the budget, and what all its probes say of it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from planner.core.schema import MeasurementRecord, TrainSetting
from search.probe.evidence import price_of_compiling, usual


@dataclass(frozen=True)
class Contender:
    """A setting with all its measured probes. Rates are images/s of one device, of the probes on it
    as it usually runs. On a device that usually is throttled, `slower` says how many times as long
    each record's steps took for its heat: rates are then those at one heat."""

    setting: TrainSetting
    records: tuple[MeasurementRecord, ...]
    slower: tuple[float, ...] = ()

    @property
    def images(self) -> int:
        """In one optimizer step."""
        return self.setting.batch_size * self.setting.accumulate

    @property
    def judged(self) -> list[MeasurementRecord]:
        return usual(self.records, is_hot=bool(self.slower))

    @property
    def evidence(self) -> MeasurementRecord:
        """The record that stands for it."""
        return self.judged[0]

    @property
    def measured_rate(self) -> float:
        return self.images / median([s for record in self.judged for s in record.step_seconds])

    @property
    def rate(self) -> float:
        if not self.slower:
            return self.measured_rate
        pairs = zip(self.records, self.slower, strict=True)
        return self.images / median([s / slower for r, slower in pairs for s in r.step_seconds])

    @property
    def compile_seconds(self) -> float:
        return price_of_compiling(self.records)
