"""Subjects beside each other: a table of what differs and what comes of it, and a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.core.units import GIB, format_bytes, format_range, format_rate, format_seconds
from planner.report.page.contents import Cell, Chart, Number, Part, Section, Table, Verdict
from planner.report.page.plotting import BLUE, GREY, ORANGE, PURPLE, plot_text, restyled
from planner.report.pages.step import Step
from planner.report.settings import in_words, value_text
from planner.report.verdicts import NOT_TRACED, is_shown_as_running, verdict_of

Fields = Mapping[str, object]
_BAR_PX, _AROUND_PX = 24, 110  # of the chart, for each of its two rows
_MODEL, _CARD = "model", "card"  # fields that are named by their values


@dataclass(frozen=True)
class Entry:
    """A subject to be compared: `fields` is what it is of, `more` is what else is said of it, by
    the head of its column. The rate is of all its devices, a second; `interval` is where it lies,
    and `between_bytes` where the memory does."""

    name: str
    fields: Fields
    num_bytes: int | None
    limit_bytes: int | None
    rate: float | None
    interval: tuple[float, float] | None
    more: Mapping[str, Cell] = field(default_factory=dict)
    between_bytes: tuple[int, int] | None = None
    verdict: Verdict | None = None


def compared(
    entries: Sequence[Entry], per_second: str, key: str, said: str, best: int | None = None
) -> list[Part]:
    """The table, in which `best` is set apart, and the chart."""
    apart = differing([entry.fields for entry in entries])
    numbers = ("Fits", per_second.capitalize(), "From", "To", "Memory", "Limit")
    more = list(entries[0].more)
    headers = ["", *numbers, *(name.replace("_", " ").capitalize() for name in apart[0]), *more]
    rows = [
        [entry.name, *_figures(entry), *map(_cell, fields.values()), *(entry.more[n] for n in more)]
        for entry, fields in zip(entries, apart, strict=True)
    ]
    table = Table(headers, rows, said, [] if best is None else [best]).filled()
    return [table, _chart(entries, per_second, key)]


def _figures(entry: Entry) -> list[Cell]:
    rates = (entry.rate, *(entry.interval or (None, None)))
    return [
        entry.verdict or "-",
        *(Number(rate, format_rate(rate)) for rate in rates),
        *(Number(n, format_bytes(n) if n else "-") for n in (entry.num_bytes, entry.limit_bytes)),
    ]


def _cell(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Number(float(value), f"{value:,}")
    return "-" if value is None else value_text(value)


def _chart(entries: Sequence[Entry], per_second: str, key: str) -> Chart:
    """Memory with its limit above, rates with their intervals below."""
    from plotly.subplots import make_subplots

    names = [plot_text(entry.name) for entry in entries]
    height = 2 * (_AROUND_PX + _BAR_PX * len(entries))
    titles = ("memory, GiB", plot_text(per_second))
    figure = make_subplots(2, subplot_titles=titles, vertical_spacing=_AROUND_PX / height)
    rates = [entry.rate or 0.0 for entry in entries]
    sizes = [(entry.num_bytes or 0) / GIB for entry in entries]
    between = [e.between_bytes and (e.between_bytes[0] / GIB, e.between_bytes[1] / GIB)
               for e in entries]  # fmt: skip
    figure.add_bar(
        name="memory", y=names, x=sizes, orientation="h", marker={"color": ORANGE}, row=1, col=1,
        error_x=_error_bars(sizes, between),
    )  # fmt: skip
    figure.add_scatter(
        name="limit", y=names, x=[e.limit_bytes and e.limit_bytes / GIB for e in entries],
        mode="markers", row=1, col=1,
        marker={"symbol": "line-ns-open", "size": 16, "color": PURPLE, "line": {"width": 3}},
    )  # fmt: skip
    figure.add_bar(
        name=titles[1], y=names, x=rates, orientation="h", marker={"color": BLUE}, row=2, col=1,
        error_x=_error_bars(rates, [entry.interval for entry in entries]),
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", type="category", dtick=1)
    said = "What each needs of memory, with its limit, and how fast it is, within which interval."
    return Chart(key, restyled(figure, showlegend=False), said, height)


def _error_bars(
    values: Sequence[float], within: Sequence[tuple[float, float] | None]
) -> dict[str, object]:
    ends = [interval or (value, value) for interval, value in zip(within, values, strict=True)]
    return {
        "type": "data", "symmetric": False, "color": GREY,
        "array": [high - value for (_, high), value in zip(ends, values, strict=True)],
        "arrayminus": [value - low for (low, _), value in zip(ends, values, strict=True)],
    }  # fmt: skip


def steps_beside(steps: Sequence[Step], key: str) -> list[Section]:
    """The section that compares estimates, of which there are two or more."""
    entries = [_entry(step, name) for step, name in zip(steps, short_names(steps), strict=True)]
    said = (
        "What differs, and what comes of it: predicted, not measured. Where two ranges overlap, "
        "either may be faster. The fastest that fits is set apart."
    )
    per_second = f"{steps[0].estimate.unit}/s"
    parts = compared(entries, per_second, f"{key}-estimates", said, fastest(steps))
    return [Section("estimates", "Estimates compared", parts)]


def _entry(step: Step, name: str) -> Entry:
    """Its name says what it is of."""
    found, time = step.estimate, step.estimate.throughput
    spare, rate, interval = found.headroom_bytes, None, None
    if time is not None and is_shown_as_running(found):
        rate = time.all_images_per_second
        interval = (rate * (1 - time.uncertainty), rate * (1 + time.uncertainty))
    more: dict[str, Cell] = {
        "Memory between": format_range(found.low_bytes, found.high_bytes)
        + (f" ({NOT_TRACED})" if found.as_eager else ""),
        "Free": Number(spare, "-" if spare is None else format_bytes(spare)),
        "Step": Number(time.step_seconds, format_seconds(time.step_seconds))
        if rate and time
        else "-",
    }
    needs, between = found.device_total_bytes, (found.low_bytes, found.high_bytes)
    return Entry(
        name, {}, needs, found.budget_bytes, rate, interval, more, between, verdict_of(found)
    )


def best_text(steps: Sequence[Step]) -> str:
    """How many fit, and the fastest of them, in a sentence."""
    names = short_names(steps)
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
        f"{found.all_images_per_second:,.0f} {steps[best].estimate.unit}/s predicted "
        f"(±{found.uncertainty:.0%})"
    )
    of_those = " that fits" if len(fitting) < len(judged) else ""
    fastest_one = f"The fastest{of_those} is {names[best]}: {rate}."
    return f"{count}{fastest_one}" if judged else fastest_one


def fastest(steps: Sequence[Step]) -> int | None:
    """The number of the step with the highest rate of those that fit (of all, where no limit was
    named); None where no time is known or nothing fits."""
    rates = {
        number: time.all_images_per_second
        for number, step in enumerate(steps)
        if (time := step.estimate.throughput) is not None and step.estimate.fits is not False
    }
    return max(rates, key=lambda number: rates[number], default=None)


def differing(subjects: Sequence[Fields]) -> list[Fields]:
    """Of each subject the fields in which not all agree; a field that one lacks is None there."""
    names = list(dict.fromkeys(name for fields in subjects for name in fields))
    apart = [name for name in names if len({repr(f.get(name)) for f in subjects}) > 1]
    return [{name: fields.get(name) for name in apart} for fields in subjects]


def step_fields(steps: Sequence[Step]) -> list[Fields]:
    """What each was estimated of, without what follows from other fields: the models' own fields
    where their titles differ, the memory where the cards do."""
    one_title = len({step.estimate.model.title for step in steps}) == 1
    cards = {(step.gpu, step.estimate.budget_bytes) for step in steps}
    told = len(cards) == len({card for card, _ in cards}) > 1
    return [
        {
            _MODEL: step.estimate.model.title,
            **(step.estimate.model.model_dump(exclude={"name"}) if one_title else {}),
            _CARD: step.gpu.name if step.gpu is not None else "no card",
            "memory": None if told or (n := step.estimate.budget_bytes) is None
            else format_bytes(n),
            "allocator": step.allocator.source if step.allocator is not None else None,
            "link": step.link,
            **step.estimate.setting.model_dump(),
        }
        for step in steps
    ]  # fmt: skip


def short_names(steps: Sequence[Step]) -> list[str]:
    """Each by what tells it apart: `rtx-4090, batch 32`; by its number where nothing does."""
    found = differing(step_fields(steps))
    cards = {fields.get(_CARD) for fields in found}
    if len(cards) == len(found) > 1 and _MODEL not in found[0]:
        found = [{_CARD: fields[_CARD]} for fields in found]  # the rest follows from the card
    names = [_in_words(fields) for fields in found]
    return [
        name if name and names.count(name) == 1 else f"{name} #{number}".strip()
        for number, name in enumerate(names, start=1)
    ]


def _in_words(fields: Fields) -> str:
    rest = {n: v for n, v in fields.items() if n not in (_MODEL, _CARD) and v is not None}
    return ", ".join([*(str(fields[n]) for n in (_MODEL, _CARD) if n in fields),
                      *([in_words(rest)] if rest else [])])  # fmt: skip
