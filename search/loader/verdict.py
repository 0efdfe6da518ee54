"""What an error that ended a loader's probe says of it."""

from __future__ import annotations

import signal

from planner.core import failures
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema.loading import LoaderStatus
from planner.core.units import format_bytes
from planner.machine.host import read_host
from planner.training.loading.pictures import BadItemError
from search.loader.watching import Watch
from search.probe import failure
from search.probe.worker.verdict import causes, classify


def classify_loader(
    error: BaseException, watch: Watch, endings: set[int], kernel_kills: int | None
) -> tuple[LoaderStatus, str]:
    """The status and the words. What a worker said before it ended goes before what torch makes of
    its end: `endings` are the signals that ended workers. `kernel_kills` were counted before."""
    heard = watch.heard()
    if heard is not None:
        return heard
    text = str(error)
    for link in causes(error):
        if isinstance(link, UnsupportedError):
            return "unsupported", str(link)
        if isinstance(link, BadItemError):
            return "faulty", str(link)
        if isinstance(link, PlannerError):
            return "crashed", str(link)
    if signal.SIGBUS in endings or failures.is_shared_memory_failure(text):
        how = "a worker ended by a bus error" if signal.SIGBUS in endings else _last_line(text)
        return "out_of_memory", f"{_shared_memory()} ({how})"
    if signal.SIGKILL in endings and failure.kernel_ran_out(kernel_kills):
        return "out_of_memory", "the kernel killed a worker: no memory is left here"
    fatal = endings - {signal.SIGTERM}
    if fatal:
        return "crashed", f"a worker ended: {failure.describe_exit(min(fatal))}"
    if failures.is_out_of_files(text):
        return "crashed", f"{_last_line(text)}: raise the limit of open files (ulimit -n)"
    status, message = classify(error)
    return ("out_of_memory" if status == "out_of_memory" else "crashed"), message


def _shared_memory() -> str:
    total = read_host().shared_memory_bytes
    size = f" ({format_bytes(total)})" if total is not None else ""
    return (
        f"/dev/shm{size} is too small for the batches that wait in it: fewer workers or batches "
        "ahead, or a larger one (docker run --shm-size=8g or --ipc=host)."
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
