"""From the probes of loaders to the one to use: measured, and the plainest of those that noise
cannot tell from the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from planner.schema.loading import LoaderRecord, LoaderSetting
from search.loader.space import plainness
from search.probe.evidence import rate_interval
from search.result.contenders import SIMPLER_COSTS
from search.space import setting_id

# Noise lets a plainer loader win (fewer workers, less memory), but only where it is slower by no
# more than a plainer step may be.


@dataclass(frozen=True)
class Loader:
    """A setting with all its measured probes."""

    setting: LoaderSetting
    records: tuple[LoaderRecord, ...]

    @property
    def samples(self) -> list[float]:
        return [s for record in self.records for s in record.batch_seconds]

    @property
    def rate(self) -> float:
        return self.setting.batch_size / median(self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        return rate_interval(self.setting.batch_size, self.samples)

    @property
    def evidence(self) -> LoaderRecord:
        """The one record that stands for it: of several, all their samples together."""
        if len(self.records) == 1:
            return self.records[0]
        flags = tuple(dict.fromkeys(f for r in self.records for f in r.flags))
        return self.records[-1].model_copy(
            update={
                "batch_seconds": tuple(self.samples),
                "images_per_second": self.rate,
                "flags": (*flags, f"{len(self.records)} probes together"),
            }
        )


def measured_loaders(records: Sequence[LoaderRecord]) -> list[Loader]:
    """The settings that ran, fastest first; one that failed once is none."""
    grouped: dict[str, list[LoaderRecord]] = {}
    for record in records:
        if not record.inconclusive:
            grouped.setdefault(setting_id(record.setting), []).append(record)
    found = [
        Loader(group[0].setting, tuple(group))
        for group in grouped.values()
        if all(r.status == "measured" and r.batch_seconds for r in group)
    ]
    return sorted(found, key=lambda loader: -loader.rate)


def choose_loader(found: Sequence[Loader]) -> Loader:
    """The fastest, or the plainest of those that cannot be told from it."""
    best = found[0]
    floor = best.rate * (1 - SIMPLER_COSTS)
    level = [o for o in found if o.rate >= floor and o.interval[1] >= best.interval[0]]
    return min(level, key=lambda o: (*plainness(o.setting), -o.rate))
