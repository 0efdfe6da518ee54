"""The process of one probe, forked from one that has imported torch: it trains, answers on its own
channel and waits to be ended. What user code prints goes to standard output and error and cannot
reach the channel."""

from __future__ import annotations

import faulthandler
import signal
from typing import NoReturn

from search.probe.protocol import Report, WorkOrder


def work(channel: int, given: str) -> NoReturn:
    """Trains as a `WorkOrder` says. It never ends by itself: what a library or the user's code does
    at exit is not the probe's, and the end of one rank is a fault to the others."""
    faulthandler.enable()  # a fatal signal leaves its stack
    order = WorkOrder.model_validate_json(given)
    report = Report(channel, 0 if order.place is None else order.place.rank)
    report.enter("import")
    from search.probe.worker.measure import measure

    report.say(measure(order.request, order.deadline, report, order.place))
    while True:
        signal.pause()
