"""How soon a search of a factory's model finds the best, with its traced prior and with a guess.

    python -m tests.benchmarks.traced_prior

Over `tests/truth/cpu_factory_2026-11-22.jsonl` (tests/truth/README.md), with the rates of the same
processor, measured on the same day while others used it too. The model is traced, or its ledgers
are read from the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from planner.core.schema import MeasurementRecord
from planner.throughput.prediction import DeviceRates
from search.loop.replay import Replay
from search.loop.space import setting_id
from search.loop.strategies.planner_strategy import PlannerStrategy
from search.loop.study.records import read_records
from search.loop.surrogate.posterior import Posterior
from search.loop.surrogate.prior import Prior, generic_prior
from search.tuning.device_prior import device_prior
from tests.benchmarks.replays import Step, pooled, probes_to_within, run_strategy

TRUTH = Path(__file__).parents[1] / "truth"
TABLE = TRUTH / "cpu_factory_2026-11-22.jsonl"
RATES = TRUTH / "cpu_rates_2026-11-22.json"
WITHIN = (0.01, 0.02)


def tables() -> dict[str, Replay]:
    """The recorded table in two readings: the samples of all rounds together, and those of the
    round that others disturbed least."""
    records = read_records(TABLE).records
    return {"all rounds": Replay(pooled(records)), "quickest round": Replay(_quickest(records))}


def _quickest(records: Iterable[MeasurementRecord]) -> list[MeasurementRecord]:
    best: dict[str, MeasurementRecord] = {}
    for record in sorted(records, key=lambda r: median(r.step_seconds)):
        best.setdefault(setting_id(record.setting), record)
    return list(best.values())


def rates() -> DeviceRates:
    return DeviceRates(**json.loads(RATES.read_text()))


def priors(replay: Replay) -> dict[str, Prior]:
    """The generic guess, and the prior from the traced step."""
    traced, notes = device_prior(
        replay.space, replay.model, replay.device, "auto", None, rates=rates(), say=print
    )
    assert not notes, notes
    return {"generic": generic_prior(replay.space, replay.device), "traced": traced}


def search(replay: Replay, prior: Prior) -> list[Step]:
    return run_strategy(PlannerStrategy(Posterior(replay.space, prior, None)), replay, None)


def main() -> None:
    print("| table | prior | first probe | to within 1% | to within 2% | in all |")
    print("|---|---|---|---|---|---|")
    for name, replay in tables().items():
        best = max(replay.rates(None).values())
        for basis, prior in priors(replay).items():
            steps = search(replay, prior)
            found = [probes_to_within(steps, best, share) for share in WITHIN]
            reached = [str(step.probes) if step else "never" for step in found]
            first = f"{steps[0].best_rate / best - 1:+.1%}"
            print(f"| {name} | {basis} | {first} | {' | '.join(reached)} | {len(steps)} |")


if __name__ == "__main__":
    main()
