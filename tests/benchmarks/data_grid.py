"""Records an exhaustive grid of loaders over made JPEGs, and holds the search to it.

    python -m tests.benchmarks.data_grid PICTURES TABLE [--limit 8m]
    python -m tests.benchmarks.data_grid --replay TABLE

Makes 2,000 pictures in PICTURES, probes every loader of this machine in a shuffled order, then all
again in another, and appends what each found to TABLE (JSON lines). It can be stopped at any time
and goes on from TABLE; after --limit no probe of a second round is begun. Then the search runs over
the table, and what it recommends stands beside the best of the grid. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from planner.core.schema.loading import LoaderRecord, LoaderSetting, Pipeline
from planner.core.units import format_seconds, parse_seconds
from planner.machine.host import read_host
from planner.training.loading.synthetic import make_synthetic
from search.loader.finding import deadline
from search.loader.options import read_pipelines
from search.loader.prober import LoaderProber
from search.loader.probing import PACKAGES
from search.loader.result import Loader, choose_loader, measured_loaders
from search.loader.space import is_plain_loader, loader_space, make_loader_space
from search.loader.strategy import LoaderStrategy
from search.loader.study import LoaderIdentity
from search.loop.limits import Limits
from search.loop.session import Session
from search.loop.space import Space, setting_id
from search.loop.strategies.strategy import TOLERANCE, Choice
from search.loop.study.records import append_records, read_records
from search.loop.study.study import MemoryStudy
from search.probe.device import describe_device, versions

NUM_PICTURES = 2000
BATCH_SIZE, IMAGE_SIZE = 32, (224, 224)
PIPELINES: tuple[Pipeline, ...] = ("torchvision", "timm")
ROUNDS = 2


@dataclass(frozen=True)
class Outcome:
    """What the search made of a recorded grid: rates are medians over all rounds."""

    chosen: Loader
    best: Loader
    num_probes: int
    num_candidates: int

    @property
    def loss(self) -> float:
        return 1 - self.chosen.rate / self.best.rate


class GridProber:
    """A recorded grid in place of a machine: the records of a setting, in turn."""

    def __init__(self, records: Sequence[LoaderRecord]) -> None:
        self.records: dict[str, list[LoaderRecord]] = {}
        for record in records:
            self.records.setdefault(setting_id(record.setting), []).append(record)
        self.asked: Counter[str] = Counter()

    def __call__(
        self, choice: Choice[LoaderSetting], probe_id: str, deadline_seconds: float
    ) -> LoaderRecord:
        records = self.records[choice.candidate.id]
        self.asked[choice.candidate.id] += 1
        return records[(self.asked[choice.candidate.id] - 1) % len(records)]


def replay(records: Sequence[LoaderRecord]) -> Outcome:
    """The search over a recorded grid, as `planner data` does it on a machine."""
    grid = measured_loaders(records)
    space = loader_space(loader.setting for loader in grid)
    prober = GridProber(records)
    session: Session[LoaderSetting, LoaderRecord] = Session(
        space, MemoryStudy(), prober, Limits(), lambda choice: 60.0, None, plain=is_plain_loader
    )
    session.run(LoaderStrategy(space, TOLERANCE))
    wanted = choose_loader(measured_loaders(session.records)).setting
    chosen = next(loader for loader in grid if loader.setting == wanted)
    return Outcome(chosen, grid[0], len(session.records), len(space))


def record_grid(
    pictures: Path, table: Path, pipelines: Sequence[Pipeline], limit_seconds: float
) -> None:
    source, host = make_synthetic(pictures, NUM_PICTURES), read_host()
    identity = LoaderIdentity(source, host, describe_device("cpu").name, versions(PACKAGES))
    space = make_loader_space(
        source, host, BATCH_SIZE, IMAGE_SIZE, has_cuda=False, pipelines=pipelines
    )
    began, allowed = time.monotonic(), deadline(host)
    with LoaderProber(source, "cpu", space) as prober:
        for number in range(ROUNDS):
            for choice in shuffled(space, number):
                done = Counter(
                    setting_id(r.setting) for r in read_records(table, LoaderRecord).records
                )
                spent = time.monotonic() - began
                if done[choice.candidate.id] > number or (number and spent > limit_seconds):
                    continue
                found = prober(choice, "", allowed(choice))
                found = identity.stamped(found)
                append_records(table, [found], "TABLE")
                print(
                    f"{format_seconds(spent)}: {found.setting.title}: {found.status} "
                    f"{found.images_per_second or 0:.4g} images/s {found.message}",
                    flush=True,
                )


def shuffled(space: Space[LoaderSetting], seed: int) -> list[Choice[LoaderSetting]]:
    found = [Choice(c) for c in space.candidates]
    Random(seed).shuffle(found)
    return found


def show(records: Sequence[LoaderRecord], outcome: Outcome) -> str:
    host = records[0].host
    return "\n".join(
        (
            f"{host.get('processor')}, {records[0].date[:10]}: {len(records)} probes of "
            f"{outcome.num_candidates} loaders.",
            f"grid:   {outcome.best.setting.title}: {outcome.best.rate:.4g} images/s, "
            f"{outcome.num_candidates} probes",
            f"search: {outcome.chosen.setting.title}: {outcome.chosen.rate:.4g} images/s "
            f"({outcome.loss:.1%} below), {outcome.num_probes} probes "
            f"({outcome.num_probes / outcome.num_candidates:.0%} of the grid's)",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Records a grid of loaders.")
    parser.add_argument("pictures", type=Path, nargs="?")
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--limit", default="8m")
    parser.add_argument("--pipelines", default=",".join(PIPELINES))
    parser.add_argument("--replay", type=Path)
    args = parser.parse_args()
    if args.replay is None:
        if args.table is None:
            parser.error("name a folder for pictures and a TABLE, or --replay TABLE")
        pipelines = read_pipelines(args.pipelines) or PIPELINES
        record_grid(args.pictures, args.table, pipelines, parse_seconds(args.limit))
    records = read_records(args.replay or args.table, LoaderRecord).records
    print(show(records, replay(records)))


if __name__ == "__main__":
    main()
