"""The tables of docs/distributed.md that hold links to what was published, from `links.json`.

python -m tests.benchmarks.link_tables
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from planner.core.schema.link import bus_factor
from planner.core.units import KIB, MIB
from planner.machine.hardware.links import Link, Rate, all_links, find_link, read_catalogue

# Sizes at which a link of one rate is laid beside a link of many.
SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)


def held_out() -> Iterable[tuple[Link, int, int, float]]:
    """(link, ranks, bytes, seconds) of published all-reduces that no prediction uses."""
    for entry in read_catalogue()["links"]:
        for curve in entry.get("held_out", ()):
            for size, microseconds in curve["points"]:
                yield find_link(entry["name"]), curve["ranks"], size, microseconds * 1e-6


def held_out_table() -> str:
    """Each point that was held out, beside its prediction."""
    rows = [
        [link.name, ranks, _size(size), f"{1e6 * took:,.0f} µs", f"{1e6 * said:,.0f} µs",
         f"{said / took - 1:+.0%}"]
        for link, ranks, size, took in held_out()
        for said in [link.seconds("all_reduce", size, ranks)]
    ]  # fmt: skip
    return _table(["link", "GPUs", "size", "published", "predicted", "off"], rows)


def other_machines_table() -> str:
    """Bus bandwidths of large arrays on machines whose figures no prediction uses."""
    data = read_catalogue()
    rows = []
    for entry in data["links"]:
        for rate in entry.get("held_out_rates", ()):
            said = find_link(entry["name"]).bus_rate("all_reduce", rate["ranks"]) / 1e9
            source = data["documents"][rate["document"]].partition(",")[0].partition(":")[0]
            rows.append(
                [entry["name"], rate["ranks"], source, f"{rate['gb_s']:g} GB/s", f"{said:.0f} GB/s",
                 f"{rate['gb_s'] / said - 1:+.0%}"]
            )  # fmt: skip
    header = ["link", "GPUs", "where", "published", "predicted", "time off"]
    return _table(header, rows)


def one_rate_table() -> str:
    """How far a prediction is off that knows only the rate of large arrays, as of most links."""
    rows = []
    for link in all_links():
        for curve in link.curves:
            if curve.ranks in (2, 4, 8):
                known = replace(link, curves=(), rates=(_last_rate(curve),))
                rows.append(
                    [link.name, curve.ranks]
                    + [
                        f"{known.seconds('all_reduce', size, curve.ranks) / took - 1:+.0%}"
                        for size in SIZES
                        for took in [link.seconds("all_reduce", size, curve.ranks)]
                    ]
                )
    return _table(["link", "GPUs", *map(_size, SIZES)], rows)


def _last_rate(curve: Any) -> Rate:
    size, seconds = curve.points[-1]
    return Rate("all_reduce", curve.ranks, bus_factor("all_reduce", curve.ranks) * size / seconds)


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


TABLES = (held_out_table, other_machines_table, one_rate_table)

if __name__ == "__main__":
    for table in TABLES:
        print(table(), end="\n\n")
