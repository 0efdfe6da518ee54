"""How `planner validate` shows that its list goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from planner.cli.observations import STATUS_WORDS, describe_row
from planner.cli.progress import Show
from planner.report.standing import Ended, ended_probe
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.schema import MeasurementRecord
    from search.probe.parent.runner import ProbeEvent
    from search.validation.run import Begun, Progress
    from search.validation.survey import Seen


class ListShown:
    """Tells `show` of each thing of a list: what begins, where its worker is, what came of it."""

    def __init__(self, show: Show, budget_seconds: float | None) -> None:
        self.show = show
        self.ends_at = None if budget_seconds is None else time.monotonic() + budget_seconds

    def run(self, news: Begun | ProbeEvent) -> None:
        from search.validation.matrix import Row
        from search.validation.run import Begun

        standing, now = self.show.standing, time.monotonic()
        if not isinstance(news, Begun):
            self.show.stand(standing.stepped(news.phase, news.num_steps, news.step_seconds))
            return
        left = None if self.ends_at is None else self.ends_at - now
        is_row = isinstance(news.what, Row)
        title = describe_row(news.what) if isinstance(news.what, Row) else news.what.what
        self.show.stand(
            standing.counting("row" if is_row else "thing to see")
            .limited(news.total, left, now)
            .begun(title, news.number, now, news.deadline_seconds)
        )

    def seen(self, seen: Seen) -> None:
        record = seen.record
        word = STATUS_WORDS[record.status]
        took = format_seconds(record.seconds)
        self.show.say(f"{seen.number}/{seen.total} {record.what}: {word} ({took})")
        is_good = record.status in ("seen", "not_here")
        self._end(Ended(seen.number, record.what, word, is_good=is_good))

    def measured(self, progress: Progress) -> None:
        title, found = describe_row(progress.row), _found(progress.record)
        self.show.say(
            f"{progress.number}/{progress.total} {title}: {found} "
            f"({format_seconds(progress.seconds)})"
        )
        self._end(ended_probe(progress.number, title, progress.record))

    def _end(self, ended: Ended) -> None:
        self.show.stand(self.show.standing.finished(ended))


def _found(record: MeasurementRecord) -> str:
    if record.status != "measured":
        return record.status
    allocated = record.peak_allocated_bytes
    more = "" if allocated is None else f", {format_bytes(allocated)} allocated"
    return f"{record.images_per_second:.1f} images/s{more}"
