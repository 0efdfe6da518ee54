"""The strategy over recorded grids of loaders, and what rules loaders out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planner.core.schema.loading import LoaderRecord, LoaderSetting
from search.loader.result import choose_loader, measured_loaders
from search.loader.space import loader_space
from search.loader.strategy import LoaderStrategy
from search.loop.space import Space
from search.loop.strategies.strategy import TOLERANCE, Situation
from search.loop.study.records import read_records

TRUTH = Path(__file__).parents[2] / "truth"


def searched(
    space: Space[LoaderSetting], probe: Callable[[LoaderSetting], LoaderRecord]
) -> list[LoaderRecord]:
    strategy = LoaderStrategy(space, TOLERANCE)
    records: list[LoaderRecord] = []
    while (choice := strategy.ask(Situation())) is not None:
        records.append(probe(choice.candidate.setting))
        strategy.tell(choice.candidate, records[-1])
    return records


def test_it_is_within_5_percent_of_a_recorded_grid_in_a_third_of_its_probes() -> None:
    tables = list(TRUTH.glob("cpu_loaders_*.jsonl"))
    assert tables
    for table in tables:
        grid = measured_loaders(read_records(table, LoaderRecord).records)
        measured = {loader.setting: loader for loader in grid}
        space = loader_space(measured)
        records = searched(space, lambda setting, of=measured: of[setting].evidence)
        chosen = choose_loader(measured_loaders(records)).setting
        assert measured[chosen].rate >= 0.95 * max(loader.rate for loader in grid), table
        assert len(records) <= len(space) / 3
