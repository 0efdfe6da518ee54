"""The strategy against exhaustive grids of simulated machines, and what ends it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from planner.core.schema.loading import LoaderRecord, LoaderSetting, LoaderStatus, Pipeline
from search.loader.result import choose_loader, measured_loaders
from search.loader.space import make_loader_space
from search.loader.strategy import LoaderStrategy, most_workers
from search.loop.space import Space
from search.loop.strategies.strategy import TOLERANCE, Situation
from search.loop.study.records import read_records
from tests.benchmarks.data_grid import replay
from tests.search.loader.simulated import SOURCE, Machine, SimulatedProber, random_machine

FEW = 12  # machines, of which each kind of bound has some


def space_on(machine: Machine, has_cuda: bool = False) -> Space[LoaderSetting]:
    pipelines = list(machine.cpu_seconds)
    return make_loader_space(
        SOURCE, machine.host, 64, (224, 224), has_cuda=has_cuda, pipelines=pipelines
    )


def searched(
    space: Space[LoaderSetting], machine: Machine, prober: SimulatedProber
) -> list[LoaderRecord]:
    strategy = LoaderStrategy(space, TOLERANCE)
    records: list[LoaderRecord] = []
    while (choice := strategy.ask(Situation())) is not None:
        records.append(prober(choice, "", 60.0))
        strategy.tell(choice.candidate, records[-1])
    return records


def check(seeds: Iterable[int]) -> None:
    """Within 5% of the best of the grid, in at most a third of its probes, on every machine."""
    missed = []
    for seed in seeds:
        kind, machine = random_machine(seed)
        space = space_on(machine, has_cuda=seed % 3 == 0)
        records = searched(space, machine, SimulatedProber(machine, seed))
        chosen = choose_loader(measured_loaders(records)).setting
        best = max(machine.rate(c.setting) for c in space.candidates)
        loss = 1 - machine.rate(chosen) / best
        if loss > 0.05 or len(records) > len(space) / 3:
            missed.append((seed, kind, machine.cpus, len(space), len(records), loss))
    assert not missed


def test_it_is_close_to_the_grid_on_machines_it_does_not_know() -> None:
    check(range(FEW))


@pytest.mark.release
def test_it_is_close_to_the_grid_on_many_machines() -> None:
    check(range(FEW, 400))


def test_workers_are_doubled_and_then_all_beside_the_fastest_is_probed() -> None:
    """A disk of 350 images/s, which four workers of 100 images/s each empty."""
    machine = Machine(16, {"torchvision": 0.01, "timm": 0.012}, disk_seconds=1 / 350, noise=0.0)
    space, prober = space_on(machine), SimulatedProber(machine)
    records = searched(space, machine, prober)
    doubled = [s.workers for s in prober.asked if s.pipeline == "torchvision"][:6]
    assert doubled == [0, 1, 2, 4, 8, 16]
    best = choose_loader(measured_loaders(records)).setting
    assert {s.pipeline for s in prober.asked if s.workers == best.workers} == set(
        machine.cpu_seconds
    )
    again = LoaderStrategy(space, TOLERANCE)
    for candidate, record in ((space.find(r.setting), r) for r in records):
        again.tell(candidate, record)
    assert again.ask(Situation()) is None, "a search that goes on has nothing left to probe"


def test_what_fails_rules_out_what_needs_as_much() -> None:
    """Workers crash (a small /dev/shm, say): the search ends with what runs."""
    machine = Machine(16, {"torchvision": 0.01})
    space = space_on(machine)

    class Crashing(SimulatedProber):
        def record(self, setting: LoaderSetting) -> LoaderRecord:
            found = super().record(setting)
            if setting.workers < 3:
                return found
            update = {"status": "crashed", "batch_seconds": (), "images_per_second": None}
            return found.model_copy(update=update)

    prober = Crashing(machine)
    records = searched(space, machine, prober)
    assert choose_loader(measured_loaders(records)).setting.workers == 2
    assert len(prober.asked) <= len(space) / 3


def test_of_several_probes_the_last_stands_for_a_loader() -> None:
    """The first may have read from the disk what the others found in the page cache."""
    prober = SimulatedProber(Machine(4, {"torchvision": 0.01}))
    setting = LoaderSetting(workers=2)
    cold = prober.record(setting).model_copy(update={"bound": "disk"})
    warm = prober.record(setting)
    (found,) = measured_loaders([cold, warm])
    assert found.evidence.bound == warm.bound == "decode"
    assert found.evidence.batch_seconds == (*cold.batch_seconds, *warm.batch_seconds)
    assert found.evidence.flags == ("2 probes together",)


def test_a_pipeline_that_cannot_run_is_left() -> None:
    prober = SimulatedProber(Machine(4, {"torchvision": 0.01, "timm": 0.01}))

    def record(pipeline: Pipeline, workers: int, status: LoaderStatus) -> LoaderRecord:
        setting = LoaderSetting(pipeline=pipeline, workers=workers)
        return prober.record(setting).model_copy(update={"status": status})

    none = [record("timm", 0, "unsupported"), record("torchvision", 8, "measured")]
    assert most_workers(none, "timm") == -1
    assert most_workers(none, "torchvision") == float("inf")
    some = [record("timm", 2, "measured"), record("timm", 12, "crashed")]
    assert most_workers(some, "timm") == 7
    assert most_workers([*some, record("timm", 3, "crashed")], "timm") == 2


def test_a_pipeline_that_does_better_with_workers_is_found() -> None:
    """One process of it is slower than another pipeline's: with workers it is the faster one."""

    class Other(SimulatedProber):
        def record(self, setting: LoaderSetting) -> LoaderRecord:
            found = super().record(setting)
            if setting.pipeline == "timm" and setting.workers:
                rate = 1.25 * (found.images_per_second or 0.0)
                seconds = tuple(s / 1.25 for s in found.batch_seconds)
                update = {"images_per_second": rate, "batch_seconds": seconds}
                return found.model_copy(update=update)
            return found

    machine = Machine(2, {"torchvision": 0.005, "timm": 0.0056})
    space = space_on(machine)
    records = searched(space, machine, Other(machine))
    assert choose_loader(measured_loaders(records)).setting.pipeline == "timm"
    assert len(records) <= len(space) / 3


TABLES = sorted((Path(__file__).parents[2] / "truth").glob("cpu_loaders_*.jsonl"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_it_is_within_5_percent_of_the_grid_in_a_third_of_its_probes(table: Path) -> None:
    records = read_records(table, LoaderRecord).records
    assert records[0].data.synthetic
    assert records[0].data.num_items == 2000
    assert records[0].host["processor"]
    outcome = replay(records)
    assert outcome.loss <= 0.05
    assert outcome.num_probes <= outcome.num_candidates / 3
