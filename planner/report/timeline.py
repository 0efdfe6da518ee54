"""One optimizer step's live bytes over time, stacked by category: as a picture, and in a terminal.

The horizontal axis counts allocations and releases, not seconds.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlannerError
from planner.files import check_output, write_output
from planner.ledger import Category, Ledger
from planner.report.colours import COLOURS, STACK
from planner.report.live import LiveBytes, Phase, step_live_bytes
from planner.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCK_GLYPHS: dict[Category, str] = {
    "parameters": "█", "buffers": "▪", "optimizer_state": "▓", "gradients": "▒",
    "activations": "░", "temporaries": "•",
}  # fmt: skip
ASCII_GLYPHS: dict[Category, str] = {
    "parameters": "#", "buffers": "b", "optimizer_state": "%", "gradients": "+",
    "activations": ":", "temporaries": "o",
}  # fmt: skip
FORMATS = (".png", ".svg", ".pdf")
# More columns than a wide picture has pixels would only make the file larger.
NUM_COLUMNS = 1600
# Width of one character of a phase's name as a share of the axis (measured on a drawing).
CHARACTER_SHARE = 0.0088


def check_plot(path: str | Path) -> Path:
    """The path of a plot. Raises as `check_output`."""
    return check_output(path, "a plot", FORMATS)


def draw_timeline(
    ledger: Ledger, path: str | Path, *, title: str = "", budget_bytes: int | None = None
) -> None:
    """Draw the steady step's live bytes to `path`: PNG, SVG or PDF by its ending.

    `budget_bytes` adds a line at a device's memory where that is near enough to be seen. Raises
    UsageError for another ending, PlannerError where matplotlib is missing or `path` cannot be
    written.
    """
    figure = new_figure(12, 5.6)
    live = step_live_bytes(ledger)
    axes = figure.subplots()
    _draw_stack(axes, live)
    _draw_phases(axes, live)
    _draw_limits(axes, live, budget_bytes)
    _draw_peak(axes, live)
    figure.suptitle(title or "Live bytes of one optimizer step", x=0.01, ha="left", fontsize=13)
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. Raises PlannerError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlannerError(
            "a plot needs matplotlib, which is not installed.",
            "pip install planner[plots], or see the same in the terminal.",
        ) from None
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes PNG, SVG or PDF by the ending. Raises UsageError for another one, PlannerError where
    `path` cannot be written."""
    path = check_plot(path)
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower())
    write_output(path, drawn.getvalue())  # a full disk leaves what was there


def _draw_stack(axes: Axes, live: LiveBytes) -> None:
    points, _ = live.thin(NUM_COLUMNS)
    categories = [c for c in STACK if max(live.by_category[c])]
    axes.stackplot(
        points,
        [[live.by_category[c][i] / GIB for i in points] for c in categories],
        colors=[COLOURS[c] for c in categories],
        labels=[
            f"{c.replace('_', ' ')}  {format_bytes(live.by_category[c][live.peak])}"
            for c in categories
        ],
        step="post",
        linewidth=0,
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False,
        title="at the peak", alignment="left", handlelength=1.2,
    )  # fmt: skip
    axes.set_xlabel("allocations and releases, in order")
    axes.set_ylabel("live bytes (GiB)")
    axes.set_xlim(0, max(len(live.total) - 1, 1))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_phases(axes: Axes, live: LiveBytes) -> None:
    """A shaded band behind every other phase, and its name above where there is room."""
    count = len(live.total)
    for number, phase in enumerate(live.phases):
        if number % 2:
            axes.axvspan(phase.start, phase.stop, color="black", alpha=0.05, linewidth=0, zorder=0)
        if number:
            axes.axvline(phase.start, color="black", alpha=0.35, linewidth=0.7, linestyle=":")
        share = (phase.stop - phase.start) / count
        upright = share < CHARACTER_SHARE * len(phase.name)
        if share > 2 * CHARACTER_SHARE:
            axes.text(
                (phase.start + phase.stop) / 2,
                0.98 if upright else 1.02,
                phase.name.replace("_", " "),
                ha="center",
                va="top" if upright else "bottom",
                rotation=90 if upright else 0,
                transform=axes.get_xaxis_transform(),
                color="#444444",
            )


def _draw_limits(axes: Axes, live: LiveBytes, budget_bytes: int | None) -> None:
    top = live.peak_bytes * 1.16
    # A budget more than twice the peak would only squeeze the picture.
    if budget_bytes is not None and budget_bytes <= 2 * live.peak_bytes:
        top = max(top, budget_bytes * 1.06)
        axes.axhline(budget_bytes / GIB, color="black", linewidth=1, linestyle="--")
        axes.text(
            0.005, budget_bytes / GIB, f"budget {format_bytes(budget_bytes)}", va="bottom",
            ha="left", transform=axes.get_yaxis_transform(), fontsize=9,
        )  # fmt: skip
    axes.set_ylim(0, top / GIB)


def _draw_peak(axes: Axes, live: LiveBytes) -> None:
    height = live.peak_bytes / GIB
    right = live.peak > len(live.total) * 0.55
    axes.plot([live.peak], [height], marker="v", color="black", markersize=7, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(live.peak_bytes)}\n{live.peak_at}",
        (live.peak, height),
        xytext=(-10 if right else 10, 4),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=9,
    )


def timeline_text(
    ledger: Ledger, width: int = 100, height: int = 20, *, ascii_only: bool | None = None
) -> str:
    """The same in a terminal: `height` rows of cells, no line wider than `width` characters.

    A cell shows the category that fills most of it. By default block characters are used where
    standard output can show them.
    """
    if ascii_only is None:
        ascii_only = not _can_show("█▓▒░▼─│", sys.stdout.encoding)
    live = step_live_bytes(ledger)
    glyphs = ASCII_GLYPHS if ascii_only else BLOCK_GLYPHS
    rule, bar, tip = ("-", "|", "v") if ascii_only else ("─", "│", "▼")
    points, bounds = live.thin(max(width - 9, 10))
    columns = [_column(live, i, height, glyphs) for i in points]
    unit, name = (GIB, "GiB") if live.peak_bytes >= GIB else (MIB, "MiB")
    lines = [_peak_line(live, points, tip, width)]
    for row in range(height - 1, -1, -1):
        label = ""
        if row in (height - 1, 0) or (row + 1) % 5 == 0:
            label = f"{live.peak_bytes * (row + 1) / height / unit:.3g}"
        lines.append(f"{label:>7} {bar}" + "".join(column[row] for column in columns))
    lines.append(f"{name:>7} {'+' if ascii_only else '└'}" + rule * len(points))
    lines.append(" " * 9 + _phase_line(live.phases, bounds, bar))
    lines += _legend(live, glyphs, width)
    return "\n".join(line.rstrip() for line in lines)


def _can_show(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _column(live: LiveBytes, point: int, height: int, glyphs: dict[Category, str]) -> list[str]:
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
                shares[glyphs[category]] = share
                shares[" "] -= share
            base = top
        cells.append(max(shares, key=shares.__getitem__))
    return cells


def _peak_line(live: LiveBytes, points: list[int], tip: str, width: int) -> str:
    """The peak's marker over its column, and its name on the side with more room."""
    column = 9 + points.index(live.peak)
    text = f"peak {format_bytes(live.peak_bytes)}: {live.peak_at}"
    room_right, room_left = width - column - 2, column - 1
    if room_right >= min(len(text), room_left):
        return " " * column + f"{tip} {_shorten(text, room_right)}"
    return f"{_shorten(text, room_left):>{room_left}} {tip}"


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(length - 3, 0)] + "..."


def _phase_line(phases: tuple[Phase, ...], bounds: list[int], bar: str) -> str:
    """Each phase's name from the column it begins in, as far as there is room."""
    cells = [" "] * len(bounds)
    for phase in phases:
        columns = [c for c, first in enumerate(bounds) if phase.start <= first < phase.stop]
        if columns:
            text = (bar + phase.name)[: len(columns)]
            cells[columns[0] : columns[0] + len(text)] = text
    return "".join(cells)


def _legend(live: LiveBytes, glyphs: dict[Category, str], width: int) -> list[str]:
    entries = [
        f"{glyphs[c]} {c.replace('_', ' ')} {format_bytes(live.by_category[c][live.peak])}"
        for c in STACK
        if max(live.by_category[c])
    ]
    lines = ["at the peak: "]
    for entry in entries:
        if len(lines[-1]) + len(entry) + 3 > width and lines[-1].strip():
            lines.append(" " * 13)
        lines[-1] += entry + "   "
    return lines
