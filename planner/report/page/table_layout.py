"""How a table is laid out: which of its rows are elements of the page, and which lie packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.core.errors import printable
from planner.report.page.contents import Cell, Number, Table, Verdict

# A table of more rows has a box of its own to scroll in, and a filter.
TALL_ROWS = 15
# A longer table's first PAGE_ROWS are in the page (assets/tables.js has the same number), and all
# of them packed: 5,000 rows of 12 cells as elements took Chromium most of two seconds.
LONG_ROWS, PAGE_ROWS = 300, 100


@dataclass(frozen=True)
class LaidOut:
    """A table as the template needs it. `key` is its anchor; `rows` are elements."""

    key: str
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[bool]
    tall: bool
    packed: bool
    counted: str


@dataclass
class Tables:
    """The tables of a page in order, and the packed rows of the long ones: ([cell, …], marked),
    where a cell is a text or (value, text)."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    count: int = 0

    def lay_out(self, table: Table) -> LaidOut:
        self.count += 1
        key = f"table-{self.count}"
        total = len(table.rows)
        long = total > LONG_ROWS
        counted = f"{total:,} rows"
        if long:
            marked = set(table.marked)
            self.rows[key] = [
                [[_packed(cell) for cell in row], int(index in marked)]
                for index, row in enumerate(table.rows)
            ]
            counted = f"Rows 1–{PAGE_ROWS} · {counted}"
        return LaidOut(
            key=key,
            rows=table.rows[:PAGE_ROWS] if long else table.rows,
            numeric=numeric_columns(table),
            tall=total > TALL_ROWS,
            packed=long,
            counted=counted,
        )


def numeric_columns(table: Table) -> list[bool]:
    """Which columns hold numbers."""
    return [
        any(is_number(row[column]) for row in table.rows) for column in range(len(table.headers))
    ]


def is_number(cell: Cell) -> bool:
    return isinstance(cell, Number)


def is_verdict(cell: Cell) -> bool:
    return isinstance(cell, Verdict)


def read(cell: Cell) -> str:
    """What a cell reads as."""
    if isinstance(cell, Verdict):
        return f"{cell.icon} {cell.word}"
    if isinstance(cell, Number):
        return printable(cell.text) or "-"
    return printable(cell)


def sorted_by(cell: Cell) -> str:
    """What a cell sorts by, as an attribute; "" for text and for a number that is not known."""
    value = _known(cell)
    return "" if value is None else repr(value)


def _known(cell: Cell) -> float | None:
    """The number of a cell. None where it is not finite: JSON has no other word for it."""
    known = isinstance(cell, Number) and cell.value is not None and math.isfinite(cell.value)
    return cell.value if isinstance(cell, Number) and known else None


def _packed(cell: Cell) -> Any:
    return (_known(cell), read(cell)) if is_number(cell) else read(cell)
