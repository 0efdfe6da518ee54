"""The comparison of strategies: its prior has the error it says, and its figures add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from search.replay import Replay
from search.study.records import read_records
from tests.benchmarks import traced_prior
from tests.benchmarks.replays import pooled, probes_to_within
from tests.benchmarks.strategies import injected_prior, run_once, table_budget
from tests.benchmarks.strategy_report import Run, quantile, rewrite, show, summarise, write
from tests.search.tables import invented_table, true_seconds

REPLAY = Replay(invented_table(wobble=0.0))


@pytest.mark.parametrize("independent", [False, True])
def test_the_injected_error_has_its_size(independent: bool) -> None:
    errors = []
    for seed in range(40):
        prior = injected_prior(REPLAY, 0.1, seed, independent)
        errors += [
            float(np.log(g.seconds / true_seconds(c.setting)))
            for c, g in zip(REPLAY.space.candidates, prior.guesses, strict=True)
            if REPLAY.records[c.id][0].status == "measured"
        ]
    assert np.std(errors) == pytest.approx(0.1, rel=0.15)


def test_without_an_error_it_arrives_at_once() -> None:
    run = run_once(REPLAY, "table", "planner", 0.0, 0)
    assert run.probes is not None
    assert run.probes <= 5
    row = summarise([run])[0]
    assert row["median_probes"] == run.probes
    assert row["arrived"] == 1


def test_a_strategy_that_never_arrives_is_not_counted_as_fast() -> None:
    assert quantile([1.0, None, None], 0.5) is None
    assert quantile([1.0, 2.0, None], 0.5) == 2.0


def test_the_report_has_every_strategy_and_draws_it(tmp_path: Path) -> None:
    names = ("planner", "boundary-walk", "random")
    runs = [run_once(REPLAY, "table", name, 0.1, seed) for name in names for seed in (0, 1)]
    write(tmp_path, runs)
    assert {p.name for p in tmp_path.iterdir()} == {
        "runs.csv", "summary.csv", "curves.csv", "table.png"
    }  # fmt: skip
    lines = show(tmp_path).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(names)
    own, walk, blind = summarise(runs)
    assert own["walk_regret"] is not None
    assert walk["walk_regret"] == walk["mean_regret"]
    assert blind["prior_error"] is None


def test_strategies_that_were_not_run_again_are_kept(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    runs = [run_once(REPLAY, "table", name, 0.1, 0) for name in ("boundary-walk", "random")]
    write(before, runs)
    again = run_once(REPLAY, "table", "boundary-walk", 0.1, 1)
    rewrite(after, before, [again])
    for name in ("runs.csv", "curves.csv", "summary.csv"):
        old, new = ((d / name).read_text().splitlines() for d in (before, after))
        assert old[0] == new[0]
        assert [x for x in old if ",random," in x] == [x for x in new if ",random," in x]
    assert len([x for x in new if ",boundary-walk," in x]) == 1
    assert (after / "table.png").exists()


def test_regret_over_seconds_counts_what_had_ended() -> None:
    run = Run("t", "s", None, 0, 2, 15.0, 2, 15.0, (0.5, 0.0), (5.0, 15.0))
    assert [run.regret_at(s) for s in (1, 5, 14, 15, 99)] == [1.0, 0.5, 0.5, 0.0, 0.0]
    assert [run.regret_after(n) for n in (0, 1, 2, 3)] == [1.0, 0.5, 0.0, 0.0]


def test_a_quarter_of_the_settings_does_not_fit() -> None:
    budget = table_budget(REPLAY)
    assert (
        0.6
        < len(REPLAY.rates(budget))
        / sum(r[0].status == "measured" for r in REPLAY.records.values())
        < 0.8
    )


TABLES = sorted((Path(__file__).parents[1] / "truth").glob("*grid*.jsonl"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "error", [0.1, *(pytest.param(error, marks=pytest.mark.combinations) for error in (0.0, 0.05))]
)
def test_few_probes_over_every_recorded_table(table: Path, error: float) -> None:
    """Median ≤ 5 and 90th percentile ≤ 8 probes to within 1% of the table's best."""
    replay = Replay(pooled(read_records(table).records), str(table))
    runs = [run_once(replay, table.stem, "planner", error, seed) for seed in range(20)]
    median_probes = quantile([r.probes for r in runs], 0.5)
    most_probes = quantile([r.probes for r in runs], 0.9)
    assert median_probes is not None
    assert median_probes <= 5
    assert most_probes is not None
    assert most_probes <= 8


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
    assert arrived["traced"] is not None
    assert arrived["generic"] is not None
    assert arrived["traced"].probes == 1 < arrived["generic"].probes
    assert len(found["traced"]) < len(found["generic"])
