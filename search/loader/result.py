"""From the probes of loaders to the one to use: measured, and the plainest of those that noise
cannot tell from the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema.loading import LoaderRecord, LoaderSetting
from search.loader.space import plainness
from search.loop.contenders import Ran, groups_that_ran, level_with_best

Loader = Ran[LoaderSetting, LoaderRecord]


def measured_loaders(records: Sequence[LoaderRecord]) -> list[Loader]:
    """The settings that ran, fastest first; one that failed once is none."""
    found = [Loader(group[0].setting, group) for group in groups_that_ran(records, None)]
    return sorted(found, key=lambda loader: -loader.rate)


def choose_loader(found: Sequence[Loader]) -> Loader:
    """The fastest, or the plainest of those that cannot be told from it: with fewer workers, or
    less memory, and slower by no more than a plainer step may be."""
    return min(level_with_best(found), key=lambda o: (*plainness(o.setting), -o.rate))
