"""Compares strategies over recorded tables: how many probes, and recorded seconds, to the best.

    python -m tests.benchmarks.strategies TABLE… [--seeds 50] [--output DIRECTORY]

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
import csv
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from search.baselines import WALKS, WalkStrategy
from search.prior import ESTIMATED_BYTES, ESTIMATED_SECONDS, Guess, Prior, record_bytes
from search.records import read_records
from search.replay import Replay, Step, pooled, probes_to_within, run_strategy
from search.space import AXES, Candidate, Space
from search.strategy import PlannerStrategy, Strategy

ERRORS = (0.0, 0.05, 0.1, 0.2)
WITHIN = 0.01
QUANTILE = 0.75
MAX_PROBES = {"gp": 30, "gp-seeded": 30}  # a fit costs a second: enough to see them arrive
Make = Callable[[Space, Prior, int, int], Strategy]


@dataclass(frozen=True)
class Run:
    """One strategy, once: probes and recorded seconds until it arrived (None: never), what it
    spent in all, and its regret (a share of the best rate) after each probe."""

    table: str
    strategy: str
    error: float
    seed: int
    probes: int | None
    seconds: float | None
    total_probes: int
    total_seconds: float
    regret: tuple[float, ...]
    regret_seconds: tuple[float, ...]


def table_budget(replay: Replay) -> int:
    """The third quartile of the bytes that the table's settings took."""
    known = [n for rs in replay.records.values() for r in rs if (n := record_bytes(r))]
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
    axes = [a for a in AXES if len(space.choices[a]) > 1]
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
    return median(record.step_seconds) * ratio, float(record_bytes(record) or 1) * ratio


def _sampler(name: str, seeded: bool = False) -> Make:
    def make(space: Space, prior: Prior, budget: int, seed: int) -> Strategy:
        from search.sampler import SamplerStrategy, make_sampler

        first = _fastest_fitting(space, prior, budget) if seeded else None
        return SamplerStrategy(space, make_sampler(name, seed), budget, first)

    return make


def _fastest_fitting(space: Space, prior: Prior, budget: int) -> Candidate:
    pairs = list(zip(space.candidates, prior.guesses, strict=True))
    fitting = [p for p in pairs if p[1].num_bytes <= budget] or pairs
    return max(fitting, key=lambda p: p[0].images / p[1].seconds)[0]


def _walk(name: str) -> Make:
    return lambda space, prior, budget, seed: WalkStrategy(WALKS[name](space, prior, budget, seed))


STRATEGIES: dict[str, Make] = {
    "planner": lambda space, prior, budget, seed: PlannerStrategy(space, prior, budget),
    # The same order of probes, without the rule that ends it: comparable to walks that never end.
    "planner-unended": lambda space, prior, budget, seed: PlannerStrategy(
        space, prior, budget, tolerance=0.0
    ),
    "boundary-walk": _walk("boundary-walk"),
    "random": _walk("random-walk"),
    "tpe": _sampler("tpe"),
    "gp": _sampler("gp"),
    "gp-seeded": _sampler("gp", seeded=True),
    "largest-batch": _walk("largest-batch"),
    "bounded-grid": _walk("bounded-grid"),
}
USE_PRIOR = {"planner", "planner-unended", "boundary-walk", "gp-seeded"}


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
        table, name, error, seed,
        arrived.probes if arrived else None, arrived.seconds if arrived else None,
        last.probes, last.seconds,
        tuple(round(1 - s.best_rate / best, 5) for s in steps),
        tuple(round(s.seconds, 2) for s in steps),
    )  # fmt: skip


def run_all(
    replay: Replay, table: str, seeds: int, names: list[str], independent: bool
) -> Iterator[Run]:
    for name in names:
        for error in ERRORS if name in USE_PRIOR else (0.0,):
            for seed in range(seeds if name not in ("largest-batch", "bounded-grid") else 1):
                yield run_once(replay, table, name, error, seed, independent)


def quantile(values: list[float | None], share: float) -> float | None:
    """A quantile in which what never arrived counts as infinite; None where it is that."""
    ordered = sorted(float("inf") if v is None else v for v in values)
    found = ordered[min(int(np.ceil(share * len(ordered))) - 1, len(ordered) - 1)]
    return None if found == float("inf") else found


def summarise(runs: list[Run]) -> list[dict[str, object]]:
    """One row per table, strategy and error."""
    groups: dict[tuple[str, str, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.table, run.strategy, run.error), []).append(run)
    return [
        {
            "table": table,
            "strategy": strategy,
            "prior_error": error if strategy in USE_PRIOR else "",
            "runs": len(group),
            "arrived": sum(r.probes is not None for r in group),
            "median_probes": quantile([r.probes for r in group], 0.5),
            "p90_probes": quantile([r.probes for r in group], 0.9),
            "median_seconds": quantile([r.seconds for r in group], 0.5),
            "p90_seconds": quantile([r.seconds for r in group], 0.9),
            "mean_total_probes": round(float(np.mean([r.total_probes for r in group])), 1),
            "mean_total_seconds": round(float(np.mean([r.total_seconds for r in group])), 1),
            "final_regret_p90": quantile([r.regret[-1] if r.regret else None for r in group], 0.9),
        }
        for (table, strategy, error), group in groups.items()
    ]


def curve(runs: list[Run], length: int = 30) -> list[dict[str, object]]:
    """Median and 90th percentile of the regret after each probe, per table, strategy and error."""
    groups: dict[tuple[str, str, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.table, run.strategy, run.error), []).append(run)
    rows: list[dict[str, object]] = []
    for (table, strategy, error), group in groups.items():
        for n in range(1, length + 1):
            regret = [r.regret[min(n, len(r.regret)) - 1] for r in group if r.regret]
            spent = [r.regret_seconds[min(n, len(r.regret)) - 1] for r in group if r.regret]
            rows.append({
                "table": table, "strategy": strategy, "prior_error": error, "probes": n,
                "median_regret": round(float(np.median(regret)), 5),
                "p90_regret": round(float(np.quantile(regret, 0.9)), 5),
                "median_seconds": round(float(np.median(spent)), 2),
            })  # fmt: skip
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--independent", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs: list[Run] = []
    started = time.monotonic()
    for table in args.tables:
        replay = Replay(pooled(read_records(table).records), str(table))
        runs += run_all(
            replay, table.stem, args.seeds, args.strategies.split(","), args.independent
        )
    rows = summarise(runs)
    for row in rows:
        print(json.dumps(row))
    print(f"{len(runs)} runs in {time.monotonic() - started:.0f} s")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        write_rows(args.output / "summary.csv", rows)
        write_rows(args.output / "curves.csv", curve(runs))
        (args.output / "runs.json").write_text(
            "\n".join(
                json.dumps({**asdict(r), "regret": None, "regret_seconds": None}) for r in runs
            )
        )


if __name__ == "__main__":
    main()
