"""The process of one probe of a loader: `python -m search.loader.worker REQUEST_FD RESULT_FD`.

Reads one order, makes the loader and its workers, answers on its own channel and ends at once.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from typing import NoReturn

from search.loader.protocol import LoaderOrder
from search.probe.worker.report import Report
from search.probe.worker.worker import is_unfit, start_afresh

COMMAND = (sys.executable, "-P", "-m", "search.loader.worker")


def main() -> NoReturn:
    work(int(sys.argv[1]), int(sys.argv[2]))


def work(request_fd: int, result_fd: int) -> NoReturn:
    """Read the order, carry it out, answer it and end the process, as a step's probe does."""
    began = time.monotonic()
    if is_unfit():
        start_afresh(COMMAND, request_fd, result_fd)
    os.set_inheritable(request_fd, False)
    os.set_inheritable(result_fd, False)
    faulthandler.enable()
    with open(request_fd, "rb") as channel:
        order = LoaderOrder.model_validate_json(channel.readline())
    report = Report(result_fd, order.request.probe_id)
    report.enter("import")
    from search.loader import measure

    measure.answer(order.request, began + order.deadline_seconds, report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
