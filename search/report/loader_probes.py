"""The probes of loaders in order: a chart and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.page.contents import Cell, Chart, Number, Table
from planner.page.plotting import CYCLE, new_figure, plot_text
from planner.schema.loading import LoaderRecord
from search.probe.evidence import rate_interval
from search.report.marks import best_line, end_mark, legend_below, probe_axis
from search.report.wording import (
    bytes_text,
    date_text,
    end_of,
    end_text,
    expected_text,
    hover,
    interval_text,
    rate_text,
    seconds_text,
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
    layout = {
        "xaxis": probe_axis(len(records)),
        "yaxis": {"title": {"text": "images/s"}, "rangemode": "tozero"},
        "legend": legend_below(),
        "hovermode": "closest",
    }
    return Chart(
        key, new_figure(traces, **layout), "Images/s of each loader probed, in order.", 380
    )


def _marks(held: Sequence[tuple[int, LoaderRecord]], mark: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "cliponaxis": False,
        "x": [number for number, _ in held],
        "y": [record.images_per_second or 0.0 for _, record in held],
        "hovertext": [
            hover(
                [
                    f"probe {number}: {record.setting.title}",
                    f"{rate_text(record.images_per_second)} images/s",
                    expected_text(record, "images"),
                    short(record.message, 120),
                ]
            )
            for number, record in held
        ],
        "hoverinfo": "text",
        **mark,
    }


def loader_table(records: Sequence[LoaderRecord], best: LoaderRecord | None) -> Table:
    """Every probe."""
    headers = (
        "probe", "loader", "images/s", "ended", "interval", "bound by", "CPU an image",
        "a worker", "shared memory", "first batch", "took", "date", "flags",
    )  # fmt: skip
    rows = [_row(number, record) for number, record in enumerate(records, start=1)]
    marked = [i for i, r in enumerate(records) if best is not None and r.setting == best.setting]
    return Table(headers, rows, "Every probe of a loader.", marked)


def _row(number: int, record: LoaderRecord) -> list[Cell]:
    end, setting = end_of(record, None), record.setting
    reason = f": {short(record.message)}" if record.message else ""
    within = ""
    if record.batch_seconds:
        within = interval_text(rate_interval(setting.batch_size, record.batch_seconds))
    return [
        Number(number, str(number)),
        setting.title,
        Number(record.images_per_second, rate_text(record.images_per_second)),
        f"{end_text(end)}{reason}",
        within or "-",
        record.bound or "-",
        _seconds(record.cpu_seconds_per_image),
        _bytes(record.worker_bytes),
        _bytes(record.shared_memory_bytes),
        _seconds(record.first_batch_seconds),
        _seconds(record.probe_seconds),
        date_text(record.date),
        "; ".join(map(short, record.flags)) or "-",
    ]


def _seconds(value: float | None) -> Number:
    return Number(value, seconds_text(value))


def _bytes(value: int | None) -> Number:
    return Number(value, bytes_text(value) if value else "-")
