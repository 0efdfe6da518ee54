"""The process of one probe of a loader: `python -m search.loader.worker REQUEST_FD RESULT_FD`.

Reads one order, makes the loader and its workers, answers on its own channel and ends at once.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from search.loader.protocol import LoaderOrder
from search.probe.worker.report import Report
from search.probe.worker.worker import serve


def work(request_fd: int, result_fd: int) -> NoReturn:
    """Load as the order says."""
    serve(LoaderOrder, "search.loader.worker", request_fd, result_fd, _carry_out)


def _carry_out(order: LoaderOrder, deadline: float, report: Report) -> None:
    from search.loader import measure

    measure.answer(order.request, deadline, report)


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
