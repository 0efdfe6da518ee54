"""The page's section of feeding: the recommended step and its loader together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from planner.core.schema.loading import FedRecord, Feeding
from planner.core.units import format_rate
from planner.report.feeding import describe_data, together_text
from planner.report.page.contents import Cell, Chart, Number, Part, Section, Table, Text
from planner.report.page.plotting import BLUE, GREEN, ORANGE, VERMILION, new_figure
from planner.report.settings import describe_setting
from search.report.run import Run
from search.report.wording import (
    date_text,
    rate_cell,
    reason_text,
    seconds_cell,
)


def feeding(run: Run, key: str) -> list[Section]:
    """Step and loader together; none where the data were not looked at."""
    found = run.found.feeding if run.found is not None else None
    if found is None and not run.fed:
        return []
    parts: list[Part] = []
    if found is not None:
        parts += [Text(_sentence(found)), *map(Text, found.notes)]
        parts.append(rates_chart(run, found, f"{key}-fed-rates"))
    if run.fed:
        parts.append(_table(run.fed))
    return [Section("feeding", "Step and loader together", parts)]


def _sentence(found: Feeding) -> str:
    """Which of the two bounds, and what the device waits."""
    need = ""
    if found.bound == "loader":
        need = (
            f" About {found.needed_workers} workers would feed the step."
            if found.needed_workers is not None
            else " No number of workers here would feed the step."
        )
    waits = f"the device waits {found.waiting_share:.0%} of the time for batches"
    return (
        f"Fed from {describe_data(found.evidence.data)} by {found.loader.title}, the {found.bound} "
        f"is the limit: {waits}.{need} {together_text(found.together)}"
    ).strip()


def rates_chart(run: Run, found: Feeding, key: str) -> Chart:
    """Images/s of the step by itself, of the loader by itself, of both: by the law and measured."""
    step = run.found.evidence if run.found is not None else None
    fed = found.together
    rates = [
        ("the step by itself", step.images_per_second if step else None, BLUE),
        ("the loader by itself", found.evidence.images_per_second, ORANGE),
        ("both, computed", fed.predicted if fed else None, GREEN),
        ("both, measured", fed.images_per_second if fed else None, VERMILION),
    ]
    known = [(name, rate, colour) for name, rate, colour in rates if rate is not None]
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "x": [rate for _, rate, _ in known],
        "y": [name for name, _, _ in known],
        "marker": {"color": [colour for _, _, colour in known]},
        "text": [f"{format_rate(rate)} images/s" for _, rate, _ in known],
        "textposition": "auto",
        "hoverinfo": "skip",
    }
    layout = {"xaxis": {"title": {"text": "images/s"}}, "yaxis": {"autorange": "reversed"}}
    said = "; ".join(f"{name} {format_rate(rate)}" for name, rate, _ in known)
    return Chart(key, new_figure([trace], **layout), f"Images/s of {said}.", 110 + 45 * len(known))


def _table(fed: Sequence[FedRecord]) -> Table:
    """Runs of both together."""
    headers = (
        "step", "loader", "images/s", "ended", "computed", "fed step", "of it waiting",
        "step on a batch in memory", "took", "date",
    )  # fmt: skip
    return Table(headers, [_row(record) for record in fed], "Trainings with the real loader.")


def _row(record: FedRecord) -> list[Cell]:
    return [
        describe_setting(record.setting, record.model),
        record.loader.title,
        rate_cell(record.images_per_second),
        reason_text(record.status, record.message),
        rate_cell(record.predicted),
        _middle(record.step_seconds),
        _middle(record.wait_seconds),
        _middle(record.resident_seconds),
        seconds_cell(record.probe_seconds),
        date_text(record.date),
    ]


def _middle(seconds: Sequence[float]) -> Number:
    """The median of some times."""
    return seconds_cell(median(seconds) if seconds else None)
