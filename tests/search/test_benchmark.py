"""The comparison of strategies: its prior has the error it says, and its figures add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from search.loop.replay import Replay
from search.loop.study.records import read_records
from tests.benchmarks import traced_prior
from tests.benchmarks.replays import pooled, probes_to_within
from tests.benchmarks.strategies import run_once
from tests.benchmarks.strategy_report import quantile, show, summarise, write
from tests.search.tables import invented_table

REPLAY = Replay(invented_table(wobble=0.0))


def test_the_report_has_every_strategy(tmp_path: Path) -> None:
    names = ("planner", "boundary-walk", "random")
    runs = [run_once(REPLAY, "table", name, 0.1, seed) for name in names for seed in (0, 1)]
    write(tmp_path, runs)
    lines = show(tmp_path).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(names)
    own, walk, blind = summarise(runs)
    assert own["walk_regret"] is not None
    assert walk["walk_regret"] == walk["mean_regret"]
    assert blind["prior_error"] is None


TABLES = sorted((Path(__file__).parents[1] / "truth").glob("*grid*.jsonl"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "error", [0.1, *(pytest.param(error, marks=pytest.mark.release) for error in (0.0, 0.05))]
)
def test_few_probes_over_every_recorded_table(table: Path, error: float) -> None:
    """Median ≤ 5 and 90th percentile ≤ 8 probes to within 1% of the table's best."""
    replay = Replay(pooled(read_records(table).records), str(table))
    runs = [run_once(replay, table.stem, "planner", error, seed) for seed in range(20)]
    median_probes = quantile([r.probes for r in runs], 0.5)
    most_probes = quantile([r.probes for r in runs], 0.9)
    assert median_probes <= 5
    assert most_probes <= 8


@pytest.mark.release
@pytest.mark.parametrize("table", ["all rounds", "quickest round"])
def test_a_traced_prior_finds_a_factorys_best_sooner_than_a_guess(
    table: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guess begins with a small batch, as nothing is known; the traced one with the best."""
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "ledgers"))
    replay = traced_prior.tables()[table]
    best = max(replay.rates(None).values())
    found = {n: traced_prior.search(replay, p) for n, p in traced_prior.priors(replay).items()}
    arrived = {name: probes_to_within(steps, best, 0.01) for name, steps in found.items()}
    assert arrived["traced"].probes == 1 < arrived["generic"].probes
    assert len(found["traced"]) < len(found["generic"])
