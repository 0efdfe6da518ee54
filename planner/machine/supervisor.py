"""A process between a parent (a tuner) and its workers, which leaves no process behind.

    python -S -E supervisor.py LIFELINE_FD STATUS_FD [--remove FOLDER] COMMAND…

Only a process that outlives both can promise that nothing remains. This one holds no data and is
the reaper of all that the workers start, whatever group or session they move to. It ends everything
when all workers have ended, when the parent asks, or when the parent dies (its end of the lifeline
closes); then it also removes FOLDER. As a program it starts in a few milliseconds, since it imports
only the standard library (pathlib would double that time).

Lifeline, read:  "T" asks all to end (SIGTERM); its end of file ends them (SIGKILL); where there is
a FOLDER, "D" after that says that the parent removes it.
Status, written: "started", then "ended WAIT_STATUS NUMBER" for each worker, the wait status in the
kernel's encoding; it closes when nothing is left. Both may be one socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# The wait between two looks for processes that are still dying. It grows, since a process that is
# stuck in a driver takes seconds, and each look walks through all of /proc.
REAP_SECONDS, MAX_REAP_SECONDS = 0.002, 0.05


def main() -> NoReturn:
    lifeline, status = int(sys.argv[1]), int(sys.argv[2])
    command, folder = sys.argv[3:], ""
    if command[0] == "--remove":
        _, folder, *command = command
    supervise([lambda: os.execvp(command[0], command)], lifeline, status, folder)


def supervise(
    launches: Sequence[Callable[[], object]], lifeline: int, status: int, folder: str = ""
) -> NoReturn:
    """Fork a worker for each of `launches`, and stay until no descendant is left. Never returns.

    A worker should not return: one that does has ended with exit status 127.
    """
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (lifeline, status):
        os.set_inheritable(fd, False)  # a worker that is forked may speak by them, a program not
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    supervisor = os.getpid()
    # The worker is born ignoring what is ignored here: an order that comes at once has to wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    numbers: dict[int, int] = {}
    for number, launch in enumerate(launches):
        worker = os.fork()
        if worker == 0:
            _become_worker(launch, supervisor, (wake_read, wake_write))
        numbers[worker] = number
    _close_all_but(lifeline, status, wake_read, wake_write)
    _write(status, "started")
    _wait(numbers, lifeline, status, wake_read)
    _report(numbers, end_descendants(), status)
    if folder:
        os.close(status)
        if not _parent_removes(lifeline):
            _remove(folder)
    os._exit(0)


def _parent_removes(lifeline: int) -> bool:
    """Waits for the parent to say that it removes the folder; False where the parent has died."""
    while order := _read(lifeline):
        if b"D" in order:
            return True
    return False


def _remove(folder: str) -> None:
    for below, folders, files in os.walk(folder, topdown=False):
        for remove, names in ((os.unlink, files), (os.rmdir, folders)):
            for name in names:
                with contextlib.suppress(OSError):
                    remove(f"{below}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # noqa: PTH106


def _become_worker(launch: Callable[[], object], supervisor: int, fds: tuple[int, ...]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for fd in fds:
        os.close(fd)
    os.setsid()
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before the line above took effect
        os._exit(1)
    try:
        launch()
    except OSError as error:
        os.write(2, f"the worker could not be started: {error}\n".encode())
    os._exit(127)


def _wait(numbers: dict[int, int], lifeline: int, status: int, wake: int) -> None:
    """Waits until all workers have ended, or are to be ended."""
    while numbers:
        readable, _, _ = select.select([lifeline, wake], [], [])
        if wake in readable:
            os.read(wake, 512)
            _report(numbers, reap(), status)
        if lifeline in readable and numbers:
            if not _read(lifeline):
                return
            for pid in descendants(os.getpid()):
                _signal(pid, signal.SIGTERM)


def _report(numbers: dict[int, int], ended: dict[int, int], status: int) -> None:
    for pid in numbers.keys() & ended.keys():
        _write(status, f"ended {ended[pid]} {numbers.pop(pid)}")


def _read(lifeline: int) -> bytes:
    try:
        return os.read(lifeline, 16)
    except ConnectionResetError:  # the parent died before it heard all
        return b""


def end_descendants() -> dict[int, int]:
    """Kills and reaps every descendant, again and again until none is left. Returns wait statuses
    by pid.

    The children of a process that dies become our own, so that none escapes by forking late or by
    changing its group or session.
    """
    statuses: dict[int, int] = {}
    wait = REAP_SECONDS
    while True:
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGKILL)
        try:
            statuses.update(reap(raise_when_childless=True))
        except ChildProcessError:
            return statuses
        time.sleep(wait)
        wait = min(2 * wait, MAX_REAP_SECONDS)


def reap(raise_when_childless: bool = False) -> dict[int, int]:
    """The wait statuses of all children that have ended, by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if raise_when_childless and not ended:
                raise
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def descendants(ancestor: int) -> list[int]:
    """The pids of all descendants of `ancestor` in /proc, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            children.setdefault(_parent(int(entry)), []).append(int(entry))
    pids: list[int] = []
    open_ = list(children.get(ancestor, ()))
    while open_:
        pid = open_.pop()
        pids.append(pid)
        open_ += children.get(pid, ())
    return pids


def _parent(pid: int) -> int:
    """The parent's pid; -1 where the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return int(file.read().rpartition(b")")[2].split()[1])  # a name may hold anything
    except OSError:
        return -1


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _write(status: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, line.encode() + b"\n")


def _close_all_but(*keep: int) -> None:
    """Closes our ends of the workers' pipes, so that a pipe ends when its worker does."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        fd = int(entry)
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def set_process_option(option: int, value: int) -> None:
    """`prctl(option, value)`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


if __name__ == "__main__":
    main()
