"""Compares strategies over recorded tables: how many probes, and recorded seconds, to the best.

    python -m tests.benchmarks.strategies TABLE… [--seeds 50] [--output DIRECTORY]
    python -m tests.benchmarks.strategies --show DIRECTORY

A strategy has arrived when it has probed a setting within 1% of the fastest of the table. The prior
is the table itself with an error injected: a log-normal factor of the stated standard deviation,
seconds and bytes alike. Structured errors (the default) are as models err: half of the variance is
common to all settings that share a precision, checkpointing or compile mode, a quarter to those
that differ in batch alone, a quarter is each setting's own (of bytes, which are affine in the
batch, half is the arm's and none a setting's own). --independent makes all each setting's own.
The budget is the table's third quartile of bytes, so a quarter of the settings does not fit.
Strategies without a prior do not see it.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from search.loop.replay import Replay
from search.loop.space import Candidate, Space
from search.loop.strategies.planner_strategy import PlannerStrategy
from search.loop.strategies.strategy import Strategy
from search.loop.study.records import read_records
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import ESTIMATED_BYTES, ESTIMATED_SECONDS, Guess, Prior
from tests.benchmarks import strategy_report as report
from tests.benchmarks.replays import Step, pooled, probes_to_within, run_strategy
from tests.benchmarks.strategy_report import Run
from tests.benchmarks.walks import WALKS

ERRORS = (0.0, 0.05, 0.1, 0.2)
WITHIN = 0.01
QUANTILE = 0.75
MAX_PROBES = {"gp": 30, "gp-seeded": 30}  # a fit costs a second: enough to see them arrive
Make = Callable[[Space, Prior, int, int], Strategy]


def table_budget(replay: Replay) -> int:
    """The third quartile of the bytes that the table's settings took."""
    known = [n for rs in replay.records.values() for r in rs if (n := r.used_bytes)]
    return int(np.quantile(known, QUANTILE))


def injected_prior(replay: Replay, error: float, seed: int, independent: bool = False) -> Prior:
    """The table with an error of that standard deviation (of the logarithm)."""
    random = Random(f"{seed}/{error}")
    shares = [(0, 0, 1), (0, 0, 1)] if independent else [(0.5, 0.25, 0.25), (0.5, 0.5, 0)]
    errors = [_errors(replay.space, random, *s) for s in shares]
    guesses = []
    for c in replay.space.candidates:
        seconds, num_bytes = _truth(replay, c)
        factors = [float(np.exp(error * e[c.id])) for e in errors]
        guesses.append(Guess(seconds * factors[0], num_bytes * factors[1]))
    return Prior(tuple(guesses), ESTIMATED_SECONDS, ESTIMATED_BYTES, f"table ± {error:.0%}")


def _errors(
    space: Space, random: Random, shared: float, arm: float, own: float
) -> dict[str, float]:
    """A draw of unit variance per candidate, in the given shares of what it has in common."""
    axes = [a for a in space.axes if len(space.choices[a]) > 1]
    each = (shared / max(len(axes), 1)) ** 0.5
    values = {(a, v): random.gauss(0, each) for a in axes for v in space.choices[a]}
    arms = {a: random.gauss(0, arm**0.5) for a in dict.fromkeys(c.arm for c in space.candidates)}
    return {
        c.id: sum(values[a, getattr(c.setting, a)] for a in axes)
        + arms[c.arm]
        + random.gauss(0, own**0.5)
        for c in space.candidates
    }


def _truth(replay: Replay, c: Candidate) -> tuple[float, float]:
    """(seconds, bytes) of a candidate; scaled from the largest batch of its arm that ran where
    its own probe did not."""
    ran = [
        (o, r)
        for o in replay.space.candidates
        if o.arm == c.arm and (r := replay.records[o.id][0]).status == "measured"
    ]
    own = [(o, r) for o, r in ran if o.id == c.id] or ran[-1:]
    if not own:
        return 1.0, 2.0**40
    o, record = own[0]
    ratio = c.setting.batch_size / o.setting.batch_size
    return median(record.step_seconds) * ratio, float(record.used_bytes or 1) * ratio


def _sampler(name: str, seeded: bool = False) -> Make:
    def make(space: Space, prior: Prior, budget: int, seed: int) -> Strategy:
        from search.loop.strategies.optuna_sampler import SamplerStrategy, tpe_sampler

        sampler = tpe_sampler(seed) if name == "tpe" else gp_sampler(seed)
        strategy = SamplerStrategy(space, sampler, budget)
        if seeded:
            first = strategy.params.of(_fastest_fitting(space, prior, budget))
            strategy.study.enqueue_trial(first, skip_if_exists=True)
        return strategy

    return make


def gp_sampler(seed: int) -> Any:
    """Optuna's GPSampler, which imports torch and scipy."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=5)


def _fastest_fitting(space: Space, prior: Prior, budget: int) -> Candidate:
    pairs = list(zip(space.candidates, prior.guesses, strict=True))
    fitting = [p for p in pairs if p[1].num_bytes <= budget] or pairs
    return max(fitting, key=lambda p: p[0].images / p[1].seconds)[0]


STRATEGIES: dict[str, Make] = {
    "planner": lambda space, prior, budget, seed: PlannerStrategy(Posterior(space, prior, budget)),
    # The same order of probes, without the rule that ends it: comparable to walks that never end.
    "planner-unended": lambda space, prior, budget, seed: PlannerStrategy(
        Posterior(space, prior, budget), tolerance=0.0
    ),
    "boundary-walk": WALKS["boundary-walk"],
    "descent": WALKS["descent"],
    "random": WALKS["random"],
    "tpe": _sampler("tpe"),
    "gp": _sampler("gp"),
    "gp-seeded": _sampler("gp", seeded=True),
    "largest-batch": WALKS["largest-batch"],
    "bounded-grid": WALKS["bounded-grid"],
}
USE_PRIOR = {"planner", "planner-unended", "boundary-walk", "descent", "gp-seeded"}


def run_once(
    replay: Replay, table: str, name: str, error: float, seed: int, independent: bool = False
) -> Run:
    """One strategy over a table, to its own end."""
    budget = table_budget(replay)
    best = max(replay.rates(budget).values())
    prior = injected_prior(replay, error, seed, independent)
    strategy = STRATEGIES[name](replay.space, prior, budget, seed)
    steps = run_strategy(strategy, replay, budget, MAX_PROBES.get(name, 40))
    arrived = probes_to_within(steps, best, WITHIN)
    last = steps[-1] if steps else Step(0, 0.0, 0.0)
    return Run(
        table, name, error if name in USE_PRIOR else None, seed,
        arrived.probes if arrived else None, arrived.seconds if arrived else None,
        last.probes, last.seconds,
        tuple(round(1 - s.best_rate / best, 5) for s in steps),
    )  # fmt: skip


def run_all(
    replay: Replay, table: str, seeds: int, name: str, independent: bool = False
) -> Iterator[Run]:
    """A strategy with every error it sees and every seed that changes something."""
    for error in ERRORS if name in USE_PRIOR else (0.0,):
        for seed in range(1 if name in ("largest-batch", "bounded-grid") else seeds):
            yield run_once(replay, table, name, error, seed, independent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--independent", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path, help="print the table from that directory")
    args = parser.parse_args()
    if args.show:
        print(report.show(args.show))
        return
    runs: list[Run] = []
    for table in args.tables:
        replay = Replay(pooled(read_records(table).records), str(table))
        for name in args.strategies.split(","):
            runs += run_all(replay, table.stem, args.seeds, name, args.independent)
            print(json.dumps(report.summarise(runs[-1:])[0] | {"runs": len(runs)}), flush=True)
    for row in report.summarise(runs):
        print(json.dumps(row))
    if args.output:
        report.write(args.output, runs)


if __name__ == "__main__":
    main()
