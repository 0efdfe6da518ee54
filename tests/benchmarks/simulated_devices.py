"""Judges the search over devices that do not exist, whose physics it does not know.

    python -m tests.benchmarks.simulated_devices --devices 12 --output DIRECTORY
    python -m tests.benchmarks.simulated_devices --show DIRECTORY

Each device (tests/benchmarks/simulated_draws.py) is searched whole, as `planner tune` does: its
session, its limits, its baseline and its recommendation, over its default space. Four ways: within
a budget of seconds; within three minutes; without a budget, to the search's own end; and of eager
settings only. Regret is how much slower than the fastest setting
that runs and fits, by the truth that was drawn and not by what a probe said of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from planner.core.schema import MeasurementRecord
from search.loop.options import SearchOptions
from search.loop.search import Limits, Search, find_plain_arm
from search.loop.space import Choice
from search.loop.study import Identity, ProbeStudy
from tests.benchmarks import simulated_report as report
from tests.benchmarks.simulated_draws import (
    PAIRS,
    Device,
    Restrict,
    SimulatedProber,
    draw_device,
    make_pair,
    restricted,
)
from tests.benchmarks.simulated_report import Run
from tests.search.replays import ReplayProber

WITHIN = 0.01
MAX_PROBES = 40  # of a search without a budget that does not end by itself
EAGER: Restrict = (("compile", ("off",)),)


@dataclass(frozen=True)
class Way:
    """One way to search: a name, the axes restricted, the budget in seconds (None: none)."""

    name: str
    restrict: Restrict
    budget_seconds: float | None


BUDGET_SECONDS = 600.0
WAYS = (
    Way("budget", (), BUDGET_SECONDS),
    Way("3 minutes", (), 180.0),
    Way("unlimited", (), None),
    Way("eager", EAGER, None),
)
Task = tuple[str, Sequence[int]]


class Watch:
    """A prober that notes after each probe of the search what had been found by then."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device, self.limits = device, limits
        self.prober = ReplayProber(SimulatedProber(device), limits)
        self.rates = device.rates()
        self.best = 0.0
        self.trace: list[tuple[float, float]] = []  # seconds spent, best true rate

    def __call__(self, choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        record = self.prober(choice, probe_id, deadline_seconds)
        index = self.device.pair.space.index(choice.candidate.setting)
        assert index is not None
        if record.status == "measured":
            self.best = max(self.best, float(self.rates[index]))
        if choice.phase != "baseline":
            self.trace.append((self.limits.spent_seconds, self.best))
        return record


def search_device(
    device: Device, way: str, budget_seconds: float | None = None, max_probes: int = MAX_PROBES
) -> Run:
    """One whole search of a device, and what came of it."""
    pair = device.pair
    trials = None if budget_seconds else max_probes
    limits = Limits(trials, budget_seconds, clock=lambda: 0.0)
    watch = Watch(device, limits)
    options = SearchOptions(trials=trials, budget_seconds=budget_seconds)
    identity = Identity(
        model=pair.model, device=pair.device, versions={"simulated": "not measured"}
    )
    study = ProbeStudy(pair.space, budget_bytes=pair.budget_bytes)
    arm = find_plain_arm(pair.space, pair.model)
    search = Search(study, pair.prior, watch, limits, options, arm)
    stopped, _ = search.run()
    found = search.recommend(identity, stopped, [])
    best = float(watch.rates.max())
    index = pair.space.index(found.setting) if found.setting else None
    chosen = float(watch.rates[index]) if index is not None else 0.0
    regrets = [1 - rate / best for _, rate in watch.trace]
    arrived = next((i for i, r in enumerate(regrets) if r <= WITHIN), None)
    return Run(
        way=way, pair=pair.name, seed=device.seed,
        probes=len(regrets), seconds=round(watch.trace[-1][0] if watch.trace else 0.0, 1),
        best_probed=round(regrets[-1] if regrets else 1.0, 5),
        recommended=round(1 - chosen / best, 5),
        at_2_min=_at(120, watch.trace, best), at_5_min=_at(300, watch.trace, best),
        probes_to_arrive=None if arrived is None else arrived + 1,
        seconds_to_arrive=None if arrived is None else round(watch.trace[arrived][0], 1),
        nothing=found.setting is None,
        ended_by_itself=_ended_by_itself(found.stopped_because),
        stopped_because=found.stopped_because,
    )  # fmt: skip


def _at(seconds: float, trace: Sequence[tuple[float, float]], best: float) -> float:
    """The regret of the best found by then."""
    found = [rate for spent, rate in trace if spent <= seconds]
    return round(1 - (found[-1] if found else 0.0) / best, 5)


def _ended_by_itself(why: str) -> bool:
    return "another probe would gain" in why or "every candidate" in why


def run_all(seeds: Sequence[int], workers: int = 1) -> Iterator[Run]:
    """Every way over a device of each seed of each pair, in so many processes."""
    with get_context("spawn").Pool(workers) as pool:
        for runs in pool.imap_unordered(_run_pair, [(name, seeds) for name in PAIRS]):
            yield from runs


def _run_pair(task: Task) -> list[Run]:
    """Every way over the devices of a pair."""
    name, seeds = task
    drawn = (draw_device(make_pair(name), seed) for seed in seeds)
    return [
        search_device(restricted(device, way.restrict), way.name, way.budget_seconds)
        for device in drawn
        for way in WAYS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, default=7, help="of each pair")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of that directory's results")
    args = parser.parse_args()
    if args.show:
        print(report.show(args.show))
        return
    seeds = range(args.first_seed, args.first_seed + args.devices)
    asked = {"seeds": list(seeds), "budget": BUDGET_SECONDS, "pairs": list(PAIRS)}
    runs = []
    for run in run_all(seeds, args.workers):
        runs.append(run)
        print(run.line(), flush=True)
        if args.output:
            report.write(args.output, runs, asked)
    print(report.table(report.summarise(runs)))


if __name__ == "__main__":
    main()
