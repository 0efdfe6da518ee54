"""What searching simulated devices came to: a line per run, a row per strategy, the table."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from tests.benchmarks.dated import describe_machine
from tests.benchmarks.strategy_report import quantile

Row = dict[str, object]
PACKAGES = ("numpy", "optuna")


@dataclass(frozen=True)
class Run:
    """One search of one device. Regrets are shares of the true best rate; `probes` and seconds are
    the search's own, without those of the baseline. `probes_to_arrive` is until within 1%, None
    where it never was."""

    way: str
    pair: str
    seed: int
    strategy: str
    probes: int
    seconds: float
    best_probed: float
    recommended: float
    at_2_min: float
    at_5_min: float
    probes_to_arrive: int | None
    seconds_to_arrive: float | None
    failed_probes: int
    oom_probes: int
    finalist_probes: int
    nothing: bool
    ended_by_itself: bool
    stopped_because: str
    best_compile: str
    chosen_compile: str
    cpu_seconds: float

    def line(self) -> str:
        return (
            f"{self.way:17} {self.pair:16} {self.seed:3} {self.strategy:14} "
            f"{self.probes:3} probes {self.seconds:6.0f} s  probed {self.best_probed:6.1%} "
            f"chosen {self.recommended:6.1%}  arrived {self.probes_to_arrive or '-':>3}  "
            f"{self.best_compile}/{self.chosen_compile}  fail {self.failed_probes} "
            f"final {self.finalist_probes}  {self.cpu_seconds:.1f}s  {self.stopped_because[:48]}"
        )


def summarise(runs: Sequence[Run]) -> list[Row]:
    """One row per way and strategy, and of the planner one more, on only those devices that other
    strategies had too. What never arrived counts as infinitely late."""
    groups: dict[tuple[str, str], list[Run]] = {}
    shared = {(r.way, r.pair, r.seed) for r in runs if r.strategy != "planner"}
    for run in runs:
        groups.setdefault((run.way, run.strategy), []).append(run)
        if run.strategy == "planner" and (run.way, run.pair, run.seed) in shared:
            groups.setdefault((run.way, "planner on these"), []).append(run)
    return [_row(way, strategy, group) for (way, strategy), group in groups.items()]


def _row(way: str, strategy: str, group: Sequence[Run]) -> Row:
    def share(of: Sequence[bool]) -> float:
        return round(sum(of) / len(group), 4)

    later = [r.probes - r.probes_to_arrive for r in group if r.probes_to_arrive is not None]
    row: Row = {"way": way, "strategy": strategy, "devices": len(group)}
    for name in ("at_2_min", "at_5_min", "best_probed", "recommended"):
        values = [getattr(r, name) for r in group]
        row |= {
            f"{name}_median": quantile(values, 0.5),
            f"{name}_mean": round(mean(values), 5),
            f"{name}_p90": quantile(values, 0.9),
        }
    return row | {
        "recommended_max": max(r.recommended for r in group),
        "over_2_percent": share([r.recommended > 0.02 for r in group]),
        "over_5_percent": share([r.recommended > 0.05 for r in group]),
        "nothing": sum(r.nothing for r in group),
        "arrived": sum(r.probes_to_arrive is not None for r in group),
        "probes_to_arrive_median": quantile([r.probes_to_arrive for r in group], 0.5),
        "probes_to_arrive_p90": quantile([r.probes_to_arrive for r in group], 0.9),
        "seconds_to_arrive_median": quantile([r.seconds_to_arrive for r in group], 0.5),
        "seconds_to_arrive_p90": quantile([r.seconds_to_arrive for r in group], 0.9),
        "probes_after_median": quantile(later, 0.5) if later else None,
        "probes_after_p90": quantile(later, 0.9) if later else None,
        "ended_by_itself": sum(r.ended_by_itself for r in group),
        "probes_mean": round(mean(r.probes for r in group), 1),
        "probes_max": max(r.probes for r in group),
        "seconds_mean": round(mean(r.seconds for r in group), 1),
        "failed_probes_mean": round(mean(r.failed_probes for r in group), 2),
        "oom_probes_mean": round(mean(r.oom_probes for r in group), 2),
        "finalist_probes_mean": round(mean(r.finalist_probes for r in group), 2),
    }


def append(directory: Path, run: Run, first: bool) -> None:
    """One more line of runs.csv."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "runs.csv").open("w" if first else "a", newline="") as file:
        writer = csv.DictWriter(file, asdict(run).keys())
        if first:
            writer.writeheader()
        writer.writerow(asdict(run))


def finish(directory: Path, runs: Sequence[Run], asked: Mapping[str, object]) -> None:
    """summary.csv, and configuration.json: the date, what was asked, the machine and versions."""
    rows = summarise(runs)
    with (directory / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    said = {"date": str(date.today()), "asked": asked, "machine": describe_machine(PACKAGES)}
    (directory / "configuration.json").write_text(json.dumps(said, indent=1) + "\n")


def show(directory: Path) -> str:
    """The table of the results kept in a directory."""
    with (directory / "summary.csv").open(newline="") as file:
        return table(list(csv.DictReader(file)))


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Regrets as median / mean / nine in ten; "never" where fewer arrived than that. How many
    probes came then is of those that arrived."""
    lines = [
        [
            row["way"],
            row["strategy"],
            row["devices"],
            *(_spread(row, name) for name in ("at_2_min", "at_5_min", "best_probed")),
            _spread(row, "recommended"),
            row["nothing"],
            f"{row['arrived']}/{row['devices']}",
            _pair(row, "probes_to_arrive", "{:.0f}"),
            _pair(row, "seconds_to_arrive", "{:.0f}"),
            _pair(row, "probes_after", "{:.0f}"),
            f"{row['ended_by_itself']}/{row['devices']}",
            f"{row['probes_mean']} (≤ {row['probes_max']})",
        ]
        for row in rows
    ]
    headers = ["way", "strategy", "devices", "2 min", "5 min", "best probed", "recommended",
               "nothing", "within 1%", "probes until then", "seconds until then",
               "probes from there on", "ended by itself", "probes"]  # fmt: skip
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _spread(row: Mapping[str, object], name: str) -> str:
    values = (float(str(row[f"{name}_{kind}"])) for kind in ("median", "mean", "p90"))
    return " / ".join(f"{100 * v:.1f}" for v in values) + "%"


def _pair(row: Mapping[str, object], name: str, form: str) -> str:
    values = (row[f"{name}_{kind}"] for kind in ("median", "p90"))
    return " / ".join("never" if v in (None, "") else form.format(float(str(v))) for v in values)
