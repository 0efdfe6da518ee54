"""The probes of loaders in order: a chart and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.page.contents import Cell, Chart, Number, Table
from planner.page.plotting import CYCLE, new_figure, plot_text
from planner.schema.loading import LoaderRecord
from search.report.marks import best_line, end_mark, order_layout, points
from search.report.wording import (
    bytes_cell,
    date_text,
    end_of,
    expected_text,
    flags_text,
    hover,
    interval_of,
    interval_text,
    rate_cell,
    rate_text,
    reason_text,
    seconds_cell,
    short,
)


def order_chart(records: Sequence[LoaderRecord], key: str) -> Chart:
    """Images/s by the number of the probe, with the fastest so far as steps."""
    numbered = list(enumerate(records, start=1))
    rates = [r.images_per_second or 0.0 if r.status == "measured" else 0.0 for r in records]
    groups: dict[str, list[tuple[int, LoaderRecord]]] = {}
    for number, record in numbered:
        end = end_of(record, None)
        groups.setdefault(record.setting.pipeline if end == "measured" else f"!{end}", []).append(
            (number, record)
        )
    traces = [best_line(rates)]
    for colour, (name, held) in enumerate(groups.items()):
        marker = {"color": CYCLE[colour % len(CYCLE)], "size": 8}
        mark = end_mark(name[1:]) if name[0] == "!" else {"name": plot_text(name), "marker": marker}
        traces.append(_marks(held, mark))
    axis = {"title": {"text": "images/s"}, "rangemode": "tozero"}
    figure = new_figure(traces, **order_layout(len(records), axis))
    return Chart(key, figure, "Images/s of each loader probed, in order.", 380)


def _marks(held: Sequence[tuple[int, LoaderRecord]], mark: dict[str, Any]) -> dict[str, Any]:
    said = [
        hover(
            [
                f"probe {number}: {record.setting.title}",
                f"{rate_text(record.images_per_second)} images/s",
                expected_text(record, "images"),
                short(record.message, 120),
            ]
        )
        for number, record in held
    ]
    rates = (record.images_per_second or 0.0 for _, record in held)
    return points((number for number, _ in held), rates, said, cliponaxis=False, **mark)


def loader_table(records: Sequence[LoaderRecord], best: LoaderRecord | None) -> Table:
    """Every probe."""
    headers = (
        "probe", "loader", "images/s", "ended", "interval", "bound by", "CPU an image",
        "a worker", "shared memory", "first batch", "took", "date", "flags",
    )  # fmt: skip
    rows = [_row(number, record) for number, record in enumerate(records, start=1)]
    marked = [i for i, r in enumerate(records) if best is not None and r.setting == best.setting]
    return Table(headers, rows, "Every probe of a loader.", marked).filled()


def _row(number: int, record: LoaderRecord) -> list[Cell]:
    return [
        Number(number, str(number)),
        record.setting.title,
        rate_cell(record.images_per_second),
        reason_text(end_of(record, None), record.message),
        interval_text(interval_of(record)) or "-",
        record.bound or "-",
        seconds_cell(record.cpu_seconds_per_image),
        bytes_cell(record.worker_bytes),
        bytes_cell(record.shared_memory_bytes),
        seconds_cell(record.first_batch_seconds),
        seconds_cell(record.probe_seconds),
        date_text(record.date),
        flags_text(record.flags),
    ]
