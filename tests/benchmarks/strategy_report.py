"""What a comparison of strategies found: rows, and the table of docs/tuning.md."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tabulate import tabulate

from planner.core.units import format_seconds

SHOWN_ERROR = 0.1  # of the priors in the table
Row = dict[str, object]
Key = tuple[str, str, float | None]

# In the table's order: what each is.
MEANING = {
    "planner": "this one",
    "planner-unended": "this one, without the rule that ends it",
    "descent": "from the prior's fastest that fits: one axis after another, round after round",
    "boundary-walk": "the prior alone: its fastest that fits, then up or down, arm by arm",
    "gp-seeded": "Optuna's GPSampler, first at the prior's best",
    "gp": "Optuna's GPSampler",
    "tpe": "Optuna's TPESampler",
    "random": "at random, nothing twice",
    "bounded-grid": "as DeepSpeed's autotuner: each arm's largest batch, then some below",
    "largest-batch": "a batch-size finder: doubling, then bisection, as the user's setting is",
}


@dataclass(frozen=True)
class Run:
    """One strategy, once: probes and recorded seconds until it arrived (None: never), what it
    spent in all, and its regret (a share of the best rate) after each probe.

    `error` is the prior's, None for strategies that see none.
    """

    table: str
    strategy: str
    error: float | None
    seed: int
    probes: int | None
    seconds: float | None
    total_probes: int
    total_seconds: float
    regret: tuple[float, ...]

    def regret_after(self, probes: int) -> float:
        """After so many probes, or its last where it made fewer; all of it before the first."""
        return self.regret[min(probes, len(self.regret)) - 1] if probes and self.regret else 1.0


def grouped(runs: Iterable[Run]) -> dict[Key, list[Run]]:
    """Runs by table, strategy and error."""
    found: dict[Key, list[Run]] = {}
    for run in runs:
        found.setdefault((run.table, run.strategy, run.error), []).append(run)
    return found


def quantile(values: Sequence[float | None], share: float) -> float | None:
    """A quantile in which what never arrived counts as infinite; None where it is that."""
    ordered = sorted(float("inf") if v is None else v for v in values)
    found = ordered[min(int(np.ceil(share * len(ordered))) - 1, len(ordered) - 1)]
    return None if found == float("inf") else found


def summarise(runs: Sequence[Run]) -> list[Row]:
    """One row per table, strategy and error. `walk_regret` is the boundary walk's, with the same
    prior, after as many probes as the strategy made until it ended."""
    walks = {(r.table, r.error, r.seed): r for r in runs if r.strategy == "boundary-walk"}
    return [
        {
            "table": table,
            "strategy": strategy,
            "prior_error": error,
            "runs": len(group),
            "arrived": sum(r.probes is not None for r in group),
            "median_probes": quantile([r.probes for r in group], 0.5),
            "p90_probes": quantile([r.probes for r in group], 0.9),
            "median_seconds": _rounded(quantile([r.seconds for r in group], 0.5)),
            "p90_seconds": _rounded(quantile([r.seconds for r in group], 0.9)),
            "mean_total_probes": _mean(r.total_probes for r in group),
            "mean_total_seconds": _mean(r.total_seconds for r in group),
            "mean_regret": _mean((r.regret_after(r.total_probes) for r in group), 5),
            "walk_regret": _mean(
                (
                    walks[key].regret_after(r.total_probes)
                    for r in group
                    if (key := (r.table, r.error, r.seed)) in walks
                ),
                5,
            ),
        }
        for (table, strategy, error), group in grouped(runs).items()
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _mean(values: Iterable[float], digits: int = 1) -> float | None:
    known = list(values)
    return round(float(np.mean(known)), digits) if known else None


def write(directory: Path, runs: Sequence[Run]) -> None:
    """runs.csv (one line a seed) and summary.csv."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_rows(directory / "runs.csv", _lines(runs))
    _write_rows(directory / "summary.csv", summarise(runs))


def _lines(runs: Sequence[Run]) -> list[Row]:
    return [
        {"table": r.table, "strategy": r.strategy, "prior_error": r.error, "seed": r.seed,
         "probes": r.probes, "seconds": _rounded(r.seconds), "total_probes": r.total_probes,
         "total_seconds": _rounded(r.total_seconds), "regret": r.regret_after(r.total_probes)}
        for r in runs
    ]  # fmt: skip


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def show(directory: Path) -> str:
    """The table of docs/tuning.md: of every table in a directory, priors off by `SHOWN_ERROR`."""
    with (directory / "summary.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["prior_error"] in ("", str(SHOWN_ERROR))]
    tables = dict.fromkeys(r["table"] for r in rows)
    lines = [
        [
            *([row["table"]] if len(tables) > 1 else []),
            row["strategy"],
            MEANING[row["strategy"]],
            f"{row['arrived']}/{row['runs']}",
            f"{_whole(row['median_probes'])} / {_whole(row['p90_probes'])}",
            f"{_time(row['median_seconds'])} / {_time(row['p90_seconds'])}",
            f"{row['mean_total_probes']}, {_time(row['mean_total_seconds'])}",
        ]
        for table in tables
        for name in MEANING
        for row in rows
        if row["strategy"] == name and row["table"] == table
    ]
    headers = [
        *(["table"] if len(tables) > 1 else []),
        "strategy",
        "what it is",
        "arrived",
        "probes until within 1%: median / 90%",
        "recorded seconds until then",
        "until it ended by itself or was stopped",
    ]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _whole(text: str) -> str:
    return str(int(float(text))) if text else "never"


def _time(text: str) -> str:
    return format_seconds(float(text)) if text else "never"
