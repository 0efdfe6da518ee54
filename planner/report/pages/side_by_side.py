"""Several predicted steps beside each other: memory, rate, and what each difference costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.page.contents import Cell, Chart, Number, Part, Section, Table, Text
from planner.page.plotting import BLUE, GREY, ORANGE, SKY, YELLOW, plot_text
from planner.report.colours import COLOURS, STACK
from planner.report.pages.bars import bars_figure, bars_height, limit_marks
from planner.report.pages.differences import (
    Fields,
    field_text,
    field_title,
    short_names,
    step_fields,
    telling,
)
from planner.report.pages.step import Step
from planner.report.tables import BREAKDOWN_ROWS, fits_word, unit
from planner.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Bar

_MOST_PRICES = 200
_SLATE, _BROWN, _STEEL = "#5b6b7b", "#8c564b", "#4a6fa5"
_COLOURS: dict[str, str] = {
    **{str(name): colour for name, colour in COLOURS.items()},
    "workspace": _BROWN,
    "allocator_overhead": _SLATE,
    "cuda_context": _STEEL,
    "communication": YELLOW,
}
# From the left: what stays, what comes and goes, and what lies around both.
_STACKED = {name: BREAKDOWN_ROWS[name] for name in (*STACK, *BREAKDOWN_ROWS)}
_VERDICTS = {
    "yes": "fits",
    "likely": "likely fits",
    "unlikely": "unlikely to fit",
    "no": "does not fit",
    "": "no limit named",
}
_VERDICT_COLOURS = {
    "fits": BLUE,
    "likely fits": SKY,
    "unlikely to fit": ORANGE,
    "does not fit": GREY,
    "no limit named": BLUE,
}


def steps_beside(steps: Sequence[Step], key: str) -> list[Section]:
    """The sections of a group that compares `steps`, of which there are two or more."""
    names = short_names([step_fields(step) for step in steps])
    sections = [
        Section("estimates", "Estimates compared", [_table(steps)]),
        Section("memory", "Memory of each", [_memory(steps, names, f"{key}-memory")]),
    ]
    if any(step.estimate.throughput for step in steps):
        parts: list[Part] = [
            _rates(steps, names, f"{key}-rates"),
            Text(
                "Predicted, not measured. Where two ranges overlap, either may be faster.", "note"
            ),
        ]
        sections.append(Section("rates", "Predicted rate of each", parts))
    prices = _prices(steps)
    one_of_each_card = len({step.gpu for step in steps}) == len(steps)
    if prices.rows and not one_of_each_card:
        sections.append(Section("prices", "What each difference costs", [prices]))
    return sections


def best_text(steps: Sequence[Step]) -> str:
    """How many fit, and the fastest of them, in a sentence."""
    names = short_names([step_fields(step) for step in steps])
    judged = [step for step in steps if step.estimate.fits is not None]
    fitting = [step for step in judged if step.estimate.fits]
    some = "All" if len(fitting) == len(steps) else f"{len(fitting) or 'None'} of"
    count = f"{some} {len(steps)} {'fits' if len(fitting) < 2 else 'fit'}. "
    best = fastest(steps)
    if best is None:
        least = min(range(len(steps)), key=lambda n: steps[n].estimate.device_total_bytes)
        needs = format_bytes(steps[least].estimate.device_total_bytes)
        return f"{count if judged else ''}The one with the least, {names[least]}, needs {needs}."
    found = steps[best].estimate.throughput
    assert found is not None, "the fastest has a rate"
    rate = (
        f"{found.all_images_per_second:,.0f} {unit(steps[best].estimate.model)}/s predicted "
        f"(±{found.uncertainty:.0%})"
    )
    of_those = " that fits" if len(fitting) < len(judged) else ""
    fastest_one = f"The fastest{of_those} is {names[best]}: {rate}."
    return f"{count}{fastest_one}" if judged else fastest_one


def fastest(steps: Sequence[Step]) -> int | None:
    """The number of the step with the highest rate of those that fit (of all, where no limit was
    named); None where no time is known or nothing fits."""
    able = [
        number
        for number, step in enumerate(steps)
        if step.estimate.throughput is not None and step.estimate.fits is not False
    ]
    return max(able, key=lambda number: _rate(steps[number]), default=None)


def _rate(step: Step) -> float:
    found = step.estimate.throughput
    return found.all_images_per_second if found is not None else 0.0


def _table(steps: Sequence[Step]) -> Table:
    columns = telling([step_fields(step) for step in steps])
    timed = any(step.estimate.throughput for step in steps)
    what = f"{unit(steps[0].estimate.model)}/s"
    headers = [
        *(field_title(name).capitalize() for name in columns[0]),
        "Fits", *([what.capitalize()] if timed else []), "Needs", "Limit", "To spare",
        *(["Step"] if timed else []), "Memory against the first",
        *(["Rate against the first"] if timed else []),
    ]  # fmt: skip
    rows = [
        [*(_cell(value) for value in fields.values()), *_figures(step, steps[0], timed)]
        for step, fields in zip(steps, columns, strict=True)
    ]
    best = fastest(steps)
    said = "What differs, and what comes of it; the fastest that fits is marked."
    return Table(headers, rows, said, [] if best is None else [best])


def _figures(step: Step, first: Step, timed: bool) -> list[Cell]:
    found = step.estimate
    time, needs = found.throughput, found.device_total_bytes
    cells: list[Cell] = [_VERDICTS[fits_word(found)]]
    if timed:
        rate = f"{_rate(step):,.0f} ±{time.uncertainty:.0%}" if time is not None else "-"
        cells.append(Number(_rate(step) or None, rate))
    cells += [_bytes(needs), _bytes(found.budget_bytes), _bytes(found.headroom_bytes)]
    if timed:
        took = time.step_seconds if time is not None else None
        cells.append(Number(took, format_seconds(took) if took is not None else "-"))
    cells.append(_more_bytes(needs - first.estimate.device_total_bytes))
    if timed:
        cells.append(_times(_rate(step), _rate(first)))
    return cells


def _cell(value: object) -> Cell:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Number(float(value), f"{value:,}") if number else field_text(value)  # type: ignore[arg-type]


def _bytes(num_bytes: int | None) -> Number:
    return Number(num_bytes, "-" if num_bytes is None else format_bytes(num_bytes))


def _more_bytes(num_bytes: int) -> Number:
    more = f"{'+' * (num_bytes > 0)}{format_bytes(num_bytes)}"
    return Number(num_bytes, more if num_bytes else "the same")


def _times(rate: float, first: float) -> Number:
    if not rate or not first:
        return Number(None, "-")
    return Number(rate / first, f"{rate / first:.2f} ×")


def _memory(steps: Sequence[Step], names: Sequence[str], key: str) -> Chart:
    """A bar for each step, stacked by category, with its range and the limit of its card."""
    from plotly.graph_objects import Bar

    shown = [plot_text(name) for name in names]
    traces: list[Any] = [
        Bar(
            name=title,
            y=shown,
            x=[step.estimate.breakdown.get(category, 0) / GIB for step in steps],
            orientation="h",
            marker={"color": _COLOURS.get(category, GREY)},
            customdata=[format_bytes(step.estimate.breakdown.get(category, 0)) for step in steps],
            hovertemplate="%{y}<br>%{fullData.name}: %{customdata}<extra></extra>",
        )
        for category, title in _STACKED.items()
        if any(step.estimate.breakdown.get(category) for step in steps)
    ]
    limits = [step.estimate.budget_bytes for step in steps]
    if any(limits):
        traces.append(limit_marks(names, limits, "limit"))
    figure = bars_figure(traces, "GiB", names)
    said = "What each needs at its peak, by category"
    said += "; the upright mark is what its card has." if any(limits) else "."
    return Chart(key, figure, said, bars_height(len(steps)))


def _rates(steps: Sequence[Step], names: Sequence[str], key: str) -> Chart:
    """A bar for each step that has a rate, with its range, in the colour of its verdict."""
    from plotly.graph_objects import Bar

    traces: list[Bar] = []
    for verdict in dict.fromkeys(_VERDICTS.values()):
        of_verdict = [
            (name, step.estimate.throughput)
            for name, step in zip(names, steps, strict=True)
            if _VERDICTS[fits_word(step.estimate)] == verdict and step.estimate.throughput
        ]
        if not of_verdict:
            continue
        rates = [time.all_images_per_second for _, time in of_verdict]
        traces.append(
            Bar(
                name=verdict,
                y=[plot_text(name) for name, _ in of_verdict],
                x=rates,
                orientation="h",
                marker={"color": _VERDICT_COLOURS[verdict]},
                error_x={
                    "type": "data",
                    "array": [
                        time.uncertainty * rate
                        for (_, time), rate in zip(of_verdict, rates, strict=True)
                    ],
                    "thickness": 1.5,
                    "color": GREY,
                },
                customdata=[f"±{time.uncertainty:.0%}" for _, time in of_verdict],
                hovertemplate="%{y}<br>%{x:,.0f} a second (%{customdata}), %{fullData.name}"
                "<extra></extra>",
            )
        )
    what = unit(steps[0].estimate.model)
    figure = bars_figure(traces, f"{what}/s", names)
    all_of = " on all its devices" if any(s.estimate.setting.world_size > 1 for s in steps) else ""
    said = f"Predicted {what} per second of each{all_of}, with their expected range."
    return Chart(key, figure, said, bars_height(len(steps)))


def _prices(steps: Sequence[Step]) -> Table:
    """Steps that differ in one field only, one row for each pair of its neighbouring values."""
    columns = telling([step_fields(step) for step in steps])
    rows: list[list[Cell]] = []
    for field in columns[0]:
        for one, other in _pairs(columns, field):
            before, after = steps[one], steps[other]
            more = after.estimate.device_total_bytes - before.estimate.device_total_bytes
            where = {n: v for n, v in columns[one].items() if n != field}
            rows.append(
                [
                    field_title(field),
                    field_text(columns[one][field]),
                    field_text(columns[other][field]),
                    ", ".join(f"{field_title(n)} {field_text(v)}" for n, v in where.items()) or "-",
                    _more_bytes(more),
                    _times(_rate(after), _rate(before)),
                ]
            )
    said = "Estimates that differ in one thing only: what it costs in memory and gains in rate."
    headers = ["What", "From", "To", "With", "Memory", "Rate"]
    if len(rows) > _MOST_PRICES:
        said += f" The first {_MOST_PRICES} of {len(rows)}."
    return Table(headers, rows[:_MOST_PRICES], said)


def _pairs(columns: Sequence[Fields], field: str) -> list[tuple[int, int]]:
    """Numbers of subjects that agree in all but `field`, each with the next such."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, fields in enumerate(columns):
        rest = tuple(repr(value) for name, value in fields.items() if name != field)
        alike.setdefault(rest, []).append(number)
    return [pair for numbers in alike.values() for pair in itertools.pairwise(numbers)]
