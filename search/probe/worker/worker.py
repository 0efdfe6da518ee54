"""The process of one probe: `python -m search.probe.worker.worker REQUEST_FD RESULT_FD`.

Reads one work order, trains, answers on its own channel and ends at once. What user code prints
goes to standard output and error and cannot reach the channel.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from typing import NoReturn

from search.probe.protocol import Report, WorkOrder

COMMAND = (sys.executable, "-P", "-m", "search.probe.worker.worker")  # before two descriptors


def work(request_fd: int, result_fd: int) -> NoReturn:
    """Reads an order, trains and answers until its deadline, and ends the process."""
    began = time.monotonic()
    if is_unfit():
        start_afresh(request_fd, result_fd)
    prepare(request_fd, result_fd)
    with open(request_fd, "rb") as channel:
        order = WorkOrder.model_validate_json(channel.readline())
        report = Report(result_fd, order.request.probe_id)
        report.enter("import")
        _carry_out(order, began + order.deadline_seconds, report)
        if order.place is not None:
            channel.read()  # until it is closed: the end of one rank is a fault to the others
    end()


def prepare(*channels: int) -> None:
    """No process of the model's inherits a channel, and a fatal signal leaves its stack."""
    for fd in channels:
        os.set_inheritable(fd, False)
    faulthandler.enable()


def end() -> NoReturn:
    """By `os._exit`: what a library or the user's code does at exit is not the probe's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _carry_out(order: WorkOrder, deadline: float, report: Report) -> None:
    request = order.request
    from search.probe.worker.measure import measure

    report.say(measure(request, deadline, report, order.place))


def is_unfit() -> bool:
    """Whether this process was forked from one that had initialised CUDA: it can never use it.

    Asking for the number of GPUs is enough, where NVML does not answer; the server does not ask,
    and what it imports does not as far as it was read.
    """
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def start_afresh(request_fd: int, result_fd: int) -> NoReturn:
    """Become a process that has imported nothing, for the same order, which was not read yet."""
    for fd in (request_fd, result_fd):
        os.set_inheritable(fd, True)
    os.execv(COMMAND[0], [*COMMAND, str(request_fd), str(result_fd)])


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
