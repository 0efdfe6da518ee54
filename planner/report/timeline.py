"""One optimizer step's live bytes over time, stacked by category, in a terminal.

The horizontal axis counts allocations and releases, not seconds.
"""

from __future__ import annotations

from planner.core.units import GIB, MIB, format_bytes
from planner.ledger.ledger import Category, Ledger
from planner.report.live import STACK, LiveBytes, Phase, step_live_bytes

GLYPHS: dict[Category, str] = {
    "parameters": "█", "buffers": "▪", "optimizer_state": "▓", "gradients": "▒",
    "activations": "░", "temporaries": "•",
}  # fmt: skip


def timeline_text(ledger: Ledger, width: int = 100, height: int = 20) -> str:
    """The steady step as `height` rows of cells, no line wider than `width` characters.

    A cell shows the category that fills most of it.
    """
    live = step_live_bytes(ledger)
    points, bounds = live.thin(max(width - 9, 10))
    columns = [_column(live, i, height) for i in points]
    unit, name = (GIB, "GiB") if live.peak_bytes >= GIB else (MIB, "MiB")
    lines = [_peak_line(live, points, width)]
    for row in range(height - 1, -1, -1):
        label = ""
        if row in (height - 1, 0) or (row + 1) % 5 == 0:
            label = f"{live.peak_bytes * (row + 1) / height / unit:.3g}"
        lines.append(f"{label:>7} │" + "".join(column[row] for column in columns))
    lines.append(f"{name:>7} └{'─' * len(points)}")
    lines.append(" " * 9 + _phase_line(live.phases, bounds))
    lines += _legend(live, width)
    return "\n".join(line.rstrip() for line in lines)


def _column(live: LiveBytes, point: int, height: int) -> list[str]:
    """The cells of one point from the bottom up."""
    cell = live.peak_bytes / height
    cells = []
    for row in range(height):
        low, high = row * cell, (row + 1) * cell
        shares = {" ": high - low}
        base = 0
        for category in STACK:
            top = base + live.by_category[category][point]
            share = min(top, high) - max(base, low)
            if share > 0:
                shares[GLYPHS[category]] = share
                shares[" "] -= share
            base = top
        cells.append(max(shares, key=shares.__getitem__))
    return cells


def _peak_line(live: LiveBytes, points: list[int], width: int) -> str:
    """The peak's marker over its column, and its name on the side with more room."""
    column = 9 + points.index(live.peak)
    text = f"peak {format_bytes(live.peak_bytes)}: {live.peak_at}"
    room_right, room_left = width - column - 2, column - 1
    if room_right >= min(len(text), room_left):
        return " " * column + f"▼ {_shorten(text, room_right)}"
    return f"{_shorten(text, room_left):>{room_left}} ▼"


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(length - 3, 0)] + "..."


def _phase_line(phases: tuple[Phase, ...], bounds: list[int]) -> str:
    """Each phase's name from the column it begins in, as far as there is room."""
    cells = [" "] * len(bounds)
    for phase in phases:
        columns = [c for c, first in enumerate(bounds) if phase.start <= first < phase.stop]
        if columns:
            text = f"│{phase.name}"[: len(columns)]
            cells[columns[0] : columns[0] + len(text)] = text
    return "".join(cells)


def _legend(live: LiveBytes, width: int) -> list[str]:
    entries = [
        f"{GLYPHS[c]} {c.replace('_', ' ')} {format_bytes(live.by_category[c][live.peak])}"
        for c in STACK
        if max(live.by_category[c])
    ]
    lines = ["at the peak: "]
    for entry in entries:
        if len(lines[-1]) + len(entry) + 3 > width and lines[-1].strip():
            lines.append(" " * 13)
        lines[-1] += entry + "   "
    return lines
