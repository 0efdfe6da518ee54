"""Stands between a parent (a tuner) and one worker, and leaves no process behind.

    python -S -E supervisor.py LIFELINE_FD STATUS_FD [--remove FOLDER] COMMAND…

Only a process that outlives both can promise that nothing remains: this one is the reaper of all
that the worker starts (whatever group or session they move to), holds no library and no data, and
ends everything when the worker ends, when the parent asks, or when the parent dies (its end of the
lifeline closes), where it removes FOLDER too. It starts in a few milliseconds because it imports
the standard library alone (pathlib would double that time).

Lifeline, read:  "T" asks all to end (SIGTERM), "K" or end of file ends them (SIGKILL); where there
is a FOLDER, "D" after the end says that the parent removes it.
Status, written: "started GUARD_PID WORKER_PID", then "ended WAIT_STATUS NUM_LEFT_BEHIND", the wait
status in the kernel's encoding.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# How long to wait before looking again for processes that are still dying.
REAP_SECONDS = 0.002
# What that wait grows to: a process that is stuck in a driver takes seconds, and each look walks
# through all of /proc.
MAX_REAP_SECONDS = 0.05
# In the arguments of the processes that Inductor compiles in, whatever Python starts them
# (torch 2.9 to 2.13: torch/_inductor/compile_worker/__main__.py, and the pool it forks).
_COMPILER = b"/torch/_inductor/"


def main() -> NoReturn:
    lifeline, status = int(sys.argv[1]), int(sys.argv[2])
    command, folder = sys.argv[3:], ""
    if command[0] == "--remove":
        _, folder, *command = command
    supervise(lambda: os.execvp(command[0], command), lifeline, status, folder)


def supervise(
    launch: Callable[[], object], lifeline: int, status: int, folder: str = ""
) -> NoReturn:
    """Fork, `launch` the worker in the child, and stay until no descendant is left. Never returns.

    `launch` should not return: a worker that does has ended with exit status 127.
    """
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    supervisor = os.getpid()
    # The worker is born ignoring what is ignored here: an order that comes at once has to wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    worker = os.fork()
    if worker == 0:
        _become_worker(launch, supervisor, (lifeline, status, wake_read, wake_write))
    _close_all_but(lifeline, status, wake_read, wake_write)
    _say(status, f"started {supervisor} {worker}")
    ended = _wait(worker, lifeline, wake_read)
    left_behind = len([pid for pid in _strays(os.getpid()) if pid != worker])
    ended = {**end_descendants(), **ended}
    _say(status, f"ended {ended.get(worker, 0)} {left_behind}")
    os.close(status)
    if folder and not _is_told(lifeline):
        _remove(folder)
    os._exit(0)


def _is_told(lifeline: int) -> bool:
    """Waits for the parent's word that it removes what is left; False where it is no more."""
    while order := os.read(lifeline, 16):
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


def _wait(worker: int, lifeline: int, wake: int) -> dict[int, int]:
    """Until the worker has ended or is to be ended. Returns the wait statuses seen, by pid."""
    seen: dict[int, int] = {}
    while worker not in seen:
        readable, _, _ = select.select([lifeline, wake], [], [])
        if wake in readable:
            os.read(wake, 512)
            seen.update(reap())
        if lifeline in readable and worker not in seen:
            order = os.read(lifeline, 16)
            if not order or b"K" in order:
                break
            for pid in descendants(os.getpid()):
                _signal(pid, signal.SIGTERM)
    return seen


def end_descendants() -> dict[int, int]:
    """SIGKILL to every descendant, again and again until none is left, reaping all.

    Returns wait statuses by pid. What a dying process leaves behind becomes our own child, so that
    nothing escapes by forking late, by changing its group or its session.
    """
    seen: dict[int, int] = {}
    wait = REAP_SECONDS
    while True:
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGKILL)
        try:
            seen.update(reap(raise_when_childless=True))
        except ChildProcessError:
            return seen
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
    """The pids of all processes below `ancestor`, zombies included, by /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            parent = _stat(int(entry))[1]
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    open_ = list(children.get(ancestor, ()))
    while open_:
        pid = open_.pop()
        found.append(pid)
        open_ += children.get(pid, ())
    return found


def _strays(ancestor: int) -> list[int]:
    """The living processes below `ancestor` that nobody has announced.

    Inductor's compile workers are announced by their file, and leave when the worker that started
    them does: nothing to tell of a setting.
    """
    below = descendants(ancestor)
    known = {pid for pid in below if _COMPILER in _command(pid)}
    known |= {pid for of in tuple(known) for pid in descendants(of)}
    return [pid for pid in below if pid not in known and _stat(pid)[0] not in ("Z", "X", "")]


def _command(pid: int) -> bytes:
    """A process's arguments, each ended by a zero; empty for a zombie and where it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process; ("", -1) where it is gone. The name may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", -1
    return fields[0].decode(), int(fields[1])


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _say(status: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, line.encode() + b"\n")


def _close_all_but(*keep: int) -> None:
    """Hold no end of the worker's pipes, so that they end when it does."""
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
