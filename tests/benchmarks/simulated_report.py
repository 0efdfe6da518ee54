"""What searching simulated devices came to: a line per run, a row per strategy, the table."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean

from tabulate import tabulate

Row = dict[str, object]
RESULTS = Path(__file__).with_name("results")


def quantile(values: Sequence[float | None], share: float) -> float | None:
    """A quantile in which what never arrived counts as infinite; None where it is that."""
    ordered = sorted(math.inf if v is None else v for v in values)
    found = ordered[min(math.ceil(share * len(ordered)) - 1, len(ordered) - 1)]
    return None if found == math.inf else found


@dataclass(frozen=True)
class Run:
    """One search of one device. Regrets are shares of the true best rate; `probes` and seconds are
    the search's own, without those of the baseline. `probes_to_arrive` is until within 1%, None
    where it never was."""

    way: str
    pair: str
    seed: int
    probes: int
    seconds: float
    best_probed: float
    recommended: float
    at_2_min: float
    at_5_min: float
    probes_to_arrive: int | None
    seconds_to_arrive: float | None
    nothing: bool
    ended_by_itself: bool
    stopped_because: str

    def line(self) -> str:
        return (
            f"{self.way:17} {self.pair:16} {self.seed:3} {self.probes:3} probes "
            f"{self.seconds:6.0f} s  probed {self.best_probed:6.1%} chosen {self.recommended:6.1%}"
            f"  arrived {self.probes_to_arrive or '-':>3}  {self.stopped_because[:48]}"
        )


def summarise(runs: Sequence[Run]) -> list[Row]:
    """One row per way. What never arrived counts as infinitely late."""
    return [
        _row(way, [run for run in runs if run.way == way])
        for way in dict.fromkeys(run.way for run in runs)
    ]


def _row(way: str, group: Sequence[Run]) -> Row:
    later = [r.probes - r.probes_to_arrive for r in group if r.probes_to_arrive is not None]
    row: Row = {"way": way, "strategy": "planner", "devices": len(group)}
    for name in ("at_2_min", "at_5_min", "best_probed", "recommended"):
        values = [getattr(r, name) for r in group]
        row |= {
            f"{name}_median": quantile(values, 0.5),
            f"{name}_mean": round(mean(values), 5),
            f"{name}_p90": quantile(values, 0.9),
        }
    for name in ("probes_to_arrive", "seconds_to_arrive"):
        values = [getattr(r, name) for r in group]
        row |= {f"{name}_median": quantile(values, 0.5), f"{name}_p90": quantile(values, 0.9)}
    return row | {
        "recommended_max": max(r.recommended for r in group),
        "nothing": sum(r.nothing for r in group),
        "arrived": sum(r.probes_to_arrive is not None for r in group),
        "probes_after_median": quantile(later, 0.5) if later else None,
        "probes_after_p90": quantile(later, 0.9) if later else None,
        "ended_by_itself": sum(r.ended_by_itself for r in group),
        "probes_mean": round(mean(r.probes for r in group), 1),
        "probes_max": max(r.probes for r in group),
    }


def write(directory: Path, runs: Sequence[Run], asked: Mapping[str, object]) -> None:
    """runs.csv, summary.csv, and configuration.json: the date and what was asked."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("runs", [asdict(run) for run in runs]), ("summary", summarise(runs))):
        with (directory / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    said = {"date": str(date.today()), "asked": asked}
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
