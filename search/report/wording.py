"""Figures and failures of probes in words and in cells, the same in every section."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.errors import printable
from planner.core.schema import MeasurementRecord
from planner.core.units import format_bytes, format_rate, format_seconds
from planner.report.page.contents import Number
from search.probe.evidence import rate_interval

MAX_MESSAGE = 160  # characters in a table's cell; the whole stands below the table

# What a probe that did not end well is called, in the order of legends.
ENDS = {
    "out_of_memory": "out of memory",
    "over_budget": "over the budget",
    "timed_out": "out of time",
    "crashed": "crashed",
    "faulty": "faulty data",
    "non_finite": "not finite",
    "unsupported": "not supported",
    "others": "held up by others",
    "cut_short": "cut short by the budget",
}


def interval_text(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{format_rate(interval[0])} to {format_rate(interval[1])}"


def images_of(record: MeasurementRecord) -> int:
    """Of one optimizer step on one device."""
    return record.setting.batch_size * record.setting.accumulate


def interval_of(record: MeasurementRecord) -> tuple[float, float] | None:
    """Its rate's interval; None where nothing was timed."""
    return rate_interval(images_of(record), record.samples) if record.samples else None


def within_text(record: MeasurementRecord) -> str:
    """` (1,229 to 1,293)`, after a rate; "" where nothing was timed."""
    interval = interval_of(record)
    return f" ({interval_text(interval)})" if interval else ""


def bytes_text(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else format_bytes(num_bytes)


def seconds_text(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds else "-"


def rate_cell(rate: float | None) -> Number:
    return Number(rate, format_rate(rate))


def count_cell(number: int) -> Number:
    return Number(number, f"{number:,}")


def share_cell(share: float, form: str = ".1%") -> Number:
    return Number(share, f"{share:{form}}")


def bytes_cell(num_bytes: int | None) -> Number:
    return Number(num_bytes, format_bytes(num_bytes) if num_bytes else "-")


def seconds_cell(seconds: float | None) -> Number:
    return Number(seconds, seconds_text(seconds))


def date_text(date: str) -> str:
    """`2026-11-20 19:36`, of a date in ISO 8601."""
    return date[:16].replace("T", " ")


def end_of(record: MeasurementRecord, budget_bytes: int | None) -> str:
    """How a probe ended: "measured", or a key of ENDS."""
    if record.cut_short:
        return "cut_short"
    if record.inconclusive and not record.lost_device:
        return "others"
    if record.status != "measured":
        return record.status
    used = record.used_bytes
    over = budget_bytes is not None and used is not None and used > budget_bytes
    return "over_budget" if over else "measured"


def end_text(end: str) -> str:
    return ENDS.get(end, end.replace("_", " "))


def reason_text(end: str, message: str) -> str:
    """How a probe ended, and why: `crashed: …`."""
    return f"{end_text(end)}: {short(message)}" if message else end_text(end)


def flags_text(flags: Sequence[str]) -> str:
    return "; ".join(map(short, flags)) or "-"


def short(message: str, length: int = MAX_MESSAGE) -> str:
    """A message as one line, no longer than a table bears."""
    line = " ".join(printable(message[: 4 * length]).split())
    return line if len(line) <= length else f"{line[:length]}…"


def count(number: int, one: str, many: str = "") -> str:
    """`1 probe`, `12 probes`; `many` where the plural has no s by itself."""
    return f"{number:,} {one}" if number == 1 else f"{number:,} {many or f'{one}s'}"


def expected_text(record: MeasurementRecord, unit: str) -> str:
    """What the search expected of it."""
    expected = record.expected
    if expected is None:
        return "-"
    said = []
    if expected.images_per_second is not None:
        low, middle, high = map(format_rate, expected.images_per_second)
        said.append(f"{middle} {unit}/s ({low} to {high})")
    if expected.used_bytes is not None:
        said.append(bytes_text(int(expected.used_bytes[1])))
    return " in ".join(said) or "-"
