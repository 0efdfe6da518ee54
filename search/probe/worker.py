"""The process of one probe: `python -m search.probe.worker REQUEST_FD RESULT_FD`.

Reads one work order, trains, answers on its own channel and ends at once. What user code prints
goes to standard output and error and cannot reach the channel.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from typing import NoReturn

from search.probe.protocol import WorkOrder
from search.probe.report import Report


def main() -> NoReturn:
    """Ends by `os._exit`: what a library or the user's code does at exit is not the probe's."""
    request_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(request_fd, False)
    os.set_inheritable(result_fd, False)
    faulthandler.enable()
    work(request_fd, result_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def work(request_fd: int, result_fd: int) -> None:
    """Read the order, carry it out and answer it."""
    began = time.monotonic()
    with open(request_fd, "rb") as channel:
        order = WorkOrder.model_validate_json(channel.readline())
    report = Report(result_fd, order.request.probe_id)
    report.enter("import")
    from search.probe import measure

    report.outcome(measure.measure(order.request, began + order.deadline_seconds, report))


if __name__ == "__main__":
    main()
