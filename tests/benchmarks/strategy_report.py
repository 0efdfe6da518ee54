"""What a comparison of strategies found: rows, curves, the picture and the README's table."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tabulate import tabulate

from planner.units import format_seconds

MAX_PROBES_SHOWN = 30
NUM_SECONDS = 60  # points of a curve over seconds
SHOWN_ERROR = 0.1  # of the priors in the picture and the table
LEAST_SHOWN = 1e-3  # regret, on the logarithmic axis
Row = dict[str, object]
Key = tuple[str, str, float | None]

# In the order of the README's table: what each is.
MEANING = {
    "planner": "this one",
    "planner-unended": "this one, without the rule that ends it",
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
    regret_seconds: tuple[float, ...]

    def regret_after(self, probes: int) -> float:
        """After so many probes, or its last where it made fewer; all of it before the first."""
        return self.regret[min(probes, len(self.regret)) - 1] if probes and self.regret else 1.0

    def regret_at(self, seconds: float) -> float:
        """After so many recorded seconds: of the probes that had ended by then."""
        return self.regret_after(sum(s <= seconds for s in self.regret_seconds))


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


def curves(runs: Sequence[Run], instants: Mapping[str, Sequence[float]] | None = None) -> list[Row]:
    """Mean, median and 90th percentile of the regret, over probes and over recorded seconds (at
    the `instants` of each table, where they are given)."""
    rows: list[Row] = []
    for (table, strategy, error), group in grouped(runs).items():
        named = {"table": table, "strategy": strategy, "prior_error": error}
        for n in range(1, MAX_PROBES_SHOWN + 1):
            regrets = [r.regret_after(n) for r in group]
            rows.append({**named, "over": "probes", "at": n, **_spread(regrets)})
        at = instants[table] if instants else _instants([r for r in runs if r.table == table])
        for seconds in at:
            regrets = [r.regret_at(seconds) for r in group]
            rows.append({**named, "over": "seconds", "at": seconds, **_spread(regrets)})
    return rows


def _instants(runs: Sequence[Run]) -> list[float]:
    first = min(r.regret_seconds[0] for r in runs)
    last = max(r.regret_seconds[-1] for r in runs)
    return [round(float(s), 1) for s in np.geomspace(first, last, NUM_SECONDS)]


def _spread(regrets: Sequence[float]) -> Row:
    return {
        "mean_regret": round(float(np.mean(regrets)), 5),
        "median_regret": round(float(np.median(regrets)), 5),
        "p90_regret": round(float(np.quantile(regrets, 0.9)), 5),
    }


def write(directory: Path, runs: Sequence[Run]) -> None:
    """runs.csv (one line a seed), summary.csv, curves.csv and a picture per table."""
    directory.mkdir(parents=True, exist_ok=True)
    found = curves(runs)
    _write_rows(directory / "runs.csv", _lines(runs))
    _write_rows(directory / "summary.csv", summarise(runs))
    _write_rows(directory / "curves.csv", found)
    for table in dict.fromkeys(r.table for r in runs):
        draw([row for row in found if row["table"] == table], directory / f"{table}.png")


def rewrite(directory: Path, before: Path, runs: Sequence[Run]) -> None:
    """As `write`, with what `before` holds of the strategies that were not run again: those whose
    code and table are as they were."""
    directory.mkdir(parents=True, exist_ok=True)
    anew = {r.strategy for r in runs}
    old = {name: _read_rows(before / name) for name in ("runs.csv", "summary.csv", "curves.csv")}
    instants: dict[str, list[float]] = {}
    for row in old["curves.csv"]:
        if row["over"] == "seconds":
            times = instants.setdefault(str(row["table"]), [])
            times += [float(str(row["at"]))] if float(str(row["at"])) not in times else []
    found = {"runs.csv": _lines(runs), "summary.csv": summarise(runs),
             "curves.csv": curves(runs, instants)}  # fmt: skip
    for name, rows in found.items():
        kept = [row for row in old[name] if row["strategy"] not in anew]
        _write_rows(directory / name, [*rows, *kept])
    for table in instants:
        rows = [_numbered(r) for r in _read_rows(directory / "curves.csv") if r["table"] == table]
        draw(rows, directory / f"{table}.png")


def _numbered(row: Row) -> Row:
    """A row of curves.csv with its numbers as such."""
    words = ("table", "strategy", "over")
    return {k: v if k in words else float(str(v)) if v != "" else None for k, v in row.items()}


def _read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


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


def draw(rows: Sequence[Row], path: Path) -> None:
    """Mean regret over probes and over recorded seconds, priors off by `SHOWN_ERROR`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [r for r in rows if r["prior_error"] in (None, SHOWN_ERROR)]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    names = [
        n for n in MEANING if n != "planner-unended" and any(r["strategy"] == n for r in shown)
    ]
    for panel, over in zip(panels, ("probes", "seconds"), strict=True):
        for number, name in enumerate(names):
            line = [r for r in shown if r["strategy"] == name and r["over"] == over]
            panel.plot(
                [r["at"] for r in line],
                [max(float(str(r["mean_regret"])), LEAST_SHOWN) for r in line],
                label=name,
                color="black" if name == "planner" else f"C{number}",
                linewidth=2.5 if name == "planner" else 1.2,
            )
        panel.set_xlabel("probes" if over == "probes" else "recorded seconds, compilation included")
        panel.set_yscale("log")
        panel.axhline(0.01, color="grey", linewidth=0.7, linestyle=":")
        panel.grid(alpha=0.2)
    panels[1].set_xscale("log")
    panels[0].set_ylabel("slower than the table's best (mean)")
    ticks = (0.001, 0.01, 0.1, 0.5)
    panels[0].set_yticks(ticks, ["≤ 0.1%", "1%", "10%", "50%"])
    panels[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def show(directory: Path) -> str:
    """The README's table: of every table in a directory, priors off by `SHOWN_ERROR`."""
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
