"""Probes over several ranks: what each rank measured by itself."""

from __future__ import annotations

from collections.abc import Sequence

from planner.page.contents import Cell, Folded, Number, Part, Table
from planner.schema.world import RankRecord
from search.report.probe import Probe
from search.report.wording import bytes_cell, seconds_cell

HEADERS = (
    "probe", "rank", "device", "step", "forward", "allocated", "reserved", "of the device",
)  # fmt: skip


def ranks_parts(held: Sequence[Probe]) -> list[Part]:
    """A row for each rank of each probe; none where no probe had several."""
    rows = [_row(probe.number, rank) for probe in held for rank in probe.record.ranks]
    said = (
        "Of each rank the median of its own steps and its own peaks. Ranks wait for each other in "
        "every step: a slow one is seen in the first forward, in which it waits for nobody."
    )
    return [Folded("Each rank by itself", [Table(HEADERS, rows, said).filled()])] if rows else []


def _row(number: int, rank: RankRecord) -> list[Cell]:
    sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.device_bytes)
    return [
        Number(number, str(number)),
        Number(rank.rank, str(rank.rank)),
        rank.device,
        seconds_cell(rank.step_seconds),
        seconds_cell(rank.forward_seconds),
        *map(bytes_cell, sizes),
    ]
