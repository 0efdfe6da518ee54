"""Axis by axis, what each value gave: of settings that differ in that axis only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.page.contents import Cell, Chart, Folded, Number, Part, Section, Table, Text
from planner.page.plotting import BLUE, GREY, LEGEND_ABOVE, ORANGE, new_figure, plot_text
from planner.report.settings import value_text
from search.report.against import ratio_axis
from search.report.axis_pairs import BATCH, Effect, Factor, effects_of, ran_settings, varied_axes
from search.report.heat import heat_parts
from search.report.importance import axis_name, importance_parts, importances
from search.report.parted import section_of
from search.report.run import Run
from search.report.wording import bytes_cell, count_cell

if TYPE_CHECKING:
    from plotly.graph_objects import Scatter

TITLE = "Axis by axis"
MOST_ROWS = 30  # of the picture; the table has all
NO_PAIRS = (
    "No two settings that ran differ in one axis only, so nothing can be said of a value by itself."
)


def axes_sections(run: Run, key: str) -> list[Section]:
    """The section; none where all probes are of one setting."""
    return section_of(run, key, "axes", TITLE, _parts)


def _parts(run: Run, key: str) -> list[Part]:
    settings = list(dict.fromkeys(r.setting for r in run.records if not r.inconclusive))
    axes = varied_axes(settings)
    if not axes:
        return []
    ran, per_second = ran_settings(run.records), f"{run.unit}/s"
    effects = [e for axis in axes for e in effects_of(axis, axes, settings, ran)]
    compared = [e for e in effects if e.rate is not None and e.axis != BATCH]
    parts: list[Part] = []
    if compared:
        parts += [Text(_lead(compared, per_second)), _forest(compared, key, per_second)]
    elif not any(e.rate is not None for e in effects):
        parts.append(Text(NO_PAIRS))
    shares = importances(ran, axes)
    strongest = _strongest([a for a in axes if a != BATCH], shares, compared)
    if BATCH in axes and strongest:
        parts += heat_parts(run.records, ran, strongest, key, per_second)
    parts += importance_parts(shares, key)
    parts.append(Folded("Every value of every axis", [_table(effects, per_second)]))
    return parts


def _strongest(axes: Sequence[str], shares: dict[str, float], compared: Sequence[Effect]) -> str:
    """The axis beside the batch that matters most: by importance, else by the largest factor."""
    ranked = [axis for axis in shares if axis in axes]
    far = sorted(compared, key=_distance, reverse=True)
    return next(iter([*ranked, *(e.axis for e in far), *axes]), "")


def _distance(effect: Effect) -> float:
    """How far from 1 its rate's factor is, either way."""
    assert effect.rate is not None
    return max(effect.rate.median, 1 / effect.rate.median)


def _lead(compared: Sequence[Effect], per_second: str) -> str:
    several = [e for e in compared if e.rate and e.rate.num_pairs > 1]
    most = max(several or compared, key=_distance)
    assert most.rate is not None
    slower = most.rate.median < 1
    better, worse = (most.against, most.value) if slower else (most.value, most.against)
    pairs = most.rate.num_pairs
    shown = " that several pairs show" if several else ""
    of = "one pair" if pairs == 1 else f"the median of {pairs} pairs"
    return (
        f"The largest difference{shown} is that of {axis_name(most.axis)}: {value_text(better)} "
        f"gave × {_distance(most):.2f} the {per_second} of {value_text(worse)}"
        f"{_in_memory(most, slower)}, "
        f"{of} of settings that differ in nothing else. Of a value that was probed with few "
        "others, as a search does where they promise little, this knows only those."
    )


def _in_memory(effect: Effect, turned: bool) -> str:
    """What memory that took; `turned` where the value compared with is the better one."""
    if effect.memory is None:
        return ""
    factor = 1 / effect.memory.median if turned else effect.memory.median
    return " in the same memory" if abs(factor - 1) < 0.005 else f" in × {factor:.2f} the memory"


def _forest(compared: Sequence[Effect], key: str, per_second: str) -> Chart:
    """A row for each value: its rate and its memory over those of the value it is compared with."""
    rows = sorted(compared, key=_distance, reverse=True)[:MOST_ROWS]
    rows = sorted(rows, key=lambda e: [c.axis for c in compared].index(e.axis))
    factors = [f for e in rows for f in (e.rate, e.memory) if f]
    reach = max(max(f.most, 1 / f.least) for f in factors)
    rates = [(at - 0.14, e.rate, e) for at, e in enumerate(rows)]
    sizes = [(at + 0.14, e.memory, e) for at, e in enumerate(rows)]
    traces = [
        *_factors(plot_text(per_second), rates, BLUE, "circle"),
        *_factors("memory", sizes, ORANGE, "square"),
    ]  # fmt: skip
    figure = new_figure(
        traces,
        xaxis={**ratio_axis(reach), "title": {"text": "times as much"}},
        yaxis={
            "tickvals": list(range(len(rows))), "ticktext": [_row_name(e) for e in rows],
            "range": [len(rows) - 0.5, -0.5], "automargin": True, "zeroline": False,
            "ticklabelstandoff": 6,
        },
        shapes=[{
            "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1,
            "line": {"color": GREY, "width": 1, "dash": "dash"},
        }],
        legend=LEGEND_ABOVE,
    )  # fmt: skip
    said = (
        "What each value gave, of pairs of settings that differ in that axis only: the marks are "
        "medians, the lines reach from the least to the most. Right of the dashed line there is "
        f"more than with the value compared with: {per_second} to be glad of, memory to pay."
    )
    return Chart(f"{key}-axes-pairs", figure, said, 130 + 52 * len(rows))


def _factors(
    name: str, rows: Sequence[tuple[float, Factor | None, Effect]], colour: str, symbol: str
) -> list[Scatter]:
    from plotly.graph_objects import Scatter

    known = [(y, f, e) for y, f, e in rows if f is not None]
    ends = [p for y, f, _ in known for p in ((f.least, y), (f.most, y), (None, None))]
    return [
        Scatter(
            x=[x for x, _ in ends], y=[y for _, y in ends], mode="lines", hoverinfo="skip",
            line={"color": colour, "width": 2}, showlegend=False, legendgroup=name,
        ),
        Scatter(
            x=[f.median for _, f, _ in known], y=[y for y, _, _ in known], mode="markers",
            name=name, legendgroup=name, marker={"color": colour, "symbol": symbol, "size": 10},
            text=[
                f"{_row_name(e)}<br>{name}: {_factor_text(f)}, {_pairs_text(f)}"
                for _, f, e in known
            ],
            hovertemplate="%{text}<extra></extra>",
        ),
    ]  # fmt: skip


def _row_name(effect: Effect) -> str:
    """Of the picture: the axis above, the values below."""
    name = plot_text(axis_name(effect.axis))
    return f"{name}<br>{plot_text(value_text(effect.value))} ÷ {_against(effect)}"


def _against(effect: Effect) -> str:
    return plot_text(value_text(effect.against))


def _factor_text(factor: Factor) -> str:
    """`× 1.24 (1.19 to 1.31)`."""
    spread = f" ({factor.least:.2f} to {factor.most:.2f})" if factor.num_pairs > 1 else ""
    return f"× {factor.median:.2f}{spread}"


def _pairs_text(factor: Factor) -> str:
    return "one pair" if factor.num_pairs == 1 else f"{factor.num_pairs} pairs"


def _table(effects: Sequence[Effect], per_second: str) -> Table:
    headers = [
        "Axis", "Value", "Probed", "Ran", "Fastest", "Memory of it", "Compared with", "Pairs",
        per_second.capitalize(), "Memory",
    ]  # fmt: skip
    caption = (
        "Settings that were probed with each value, how many ran, the fastest of them, and over "
        "pairs that differ in nothing else the median factor (least to most)."
    )
    return Table(headers, [_row(e) for e in effects], caption)


def _row(effect: Effect) -> list[Cell]:
    best, rate = effect.best, effect.rate
    value = effect.value
    return [
        axis_name(effect.axis),
        Number(value, f"{value:,}") if type(value) in (int, float) else value_text(value),
        count_cell(effect.num_probed),
        count_cell(effect.num_ran),
        Number(best.rate, f"{best.rate:,.4g}") if best else Number(None, "-"),
        bytes_cell(best.num_bytes if best else None),
        "-" if rate is None else value_text(effect.against),
        Number(rate.num_pairs, str(rate.num_pairs)) if rate else Number(None, "-"),
        *(
            Number(f.median, _factor_text(f)) if f else Number(None, "-")
            for f in (rate, effect.memory)
        ),
    ]
