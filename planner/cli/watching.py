"""How `planner validate` shows that its list goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from planner.cli.progress import Show
from planner.core.units import format_bytes, format_seconds
from planner.report.settings import describe_setting
from search.report.status import ended_probe

if TYPE_CHECKING:
    from planner.core.schema import MeasurementRecord
    from search.probe.parent.runner import ProbeEvent
    from search.tuning.validation.matrix import Row
    from search.tuning.validation.run import Begun, Progress


class ListShown:
    """Tells `show` of each thing of a list: what begins, where its worker is, what came of it."""

    def __init__(self, show: Show, budget_seconds: float | None) -> None:
        self.show = show
        self.ends_at = None if budget_seconds is None else time.monotonic() + budget_seconds

    def run(self, news: Begun | ProbeEvent) -> None:
        from search.tuning.validation.run import Begun

        status, now = self.show.status, time.monotonic()
        if not isinstance(news, Begun):
            self.show.show_status(status.stepped(news.phase, news.num_steps, news.step_seconds))
            return
        left = None if self.ends_at is None else self.ends_at - now
        self.show.show_status(
            status.counting("row")
            .limited(news.total, left, now)
            .begun(describe_row(news.row), news.number, now, news.deadline_seconds)
        )

    def measured(self, progress: Progress) -> None:
        title, found = describe_row(progress.row), _found(progress.record)
        self.show.say(
            f"{progress.number}/{progress.total} {title}: {found} "
            f"({format_seconds(progress.seconds)})"
        )
        ended = ended_probe(progress.number, title, progress.record)
        self.show.show_status(self.show.status.finished(ended))


def describe_row(row: Row) -> str:
    """A row in words."""
    return f"{row.model.title}, {describe_setting(row.setting, row.model)}"


def _found(record: MeasurementRecord) -> str:
    if record.status != "measured":
        return record.status
    allocated = record.peak_allocated_bytes
    more = "" if allocated is None else f", {format_bytes(allocated)} allocated"
    return f"{record.images_per_second:.1f} {record.counts}/s{more}"
