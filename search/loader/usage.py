"""What the processes of a loader take: processor time, memory, files, disk.

Bytes are integers, times are seconds. Linux only; what is not told is None.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass

import psutil

from search.probe.processes import children, cpu_seconds

# How often processes are looked at. Their memory is read less often: the kernel walks their pages.
LOOK_SECONDS = 0.1
MEMORY_SECONDS = 0.5
_JOIN_SECONDS = 2.0
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's block


def private_bytes(pid: int) -> int | None:
    """What is the process's own and would be free without it (USS); None where it is not told."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return None


def shared_memory(pids: Iterable[int]) -> tuple[int, int]:
    """Bytes of /dev/shm that these processes hold between them, and the most files that one of
    them has open. torch unlinks its files at once, so that no listing of /dev/shm shows them."""
    held: dict[tuple[int, int], int] = {}
    most = 0
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            fds = os.listdir(folder)  # noqa: PTH208
        except OSError:
            continue
        most = max(most, len(fds))
        for fd in fds:
            path = f"{folder}/{fd}"
            try:
                if os.readlink(path).startswith("/dev/shm/"):  # noqa: PTH115
                    status = os.stat(path)  # noqa: PTH116
                    held[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
            except OSError:
                continue
    return sum(held.values()), most


@dataclass(frozen=True)
class Snapshot:
    """What this process and its children have used so far: processor seconds, bytes that were read
    by calls, and bytes of those that came from the disk and not the page cache."""

    main_cpu: float
    worker_cpu: float
    read_bytes: int
    disk_bytes: int

    @classmethod
    def take(cls) -> Snapshot:
        workers = children()
        read_bytes = disk_bytes = 0
        for pid in (os.getpid(), *workers):
            with suppress(psutil.Error):
                counted = psutil.Process(pid).io_counters()
                read_bytes += counted.read_chars
                disk_bytes += counted.read_bytes
        worker_cpu = sum(map(cpu_seconds, workers))
        return cls(time.process_time(), worker_cpu, read_bytes, disk_bytes)

    def __sub__(self, other: Snapshot) -> Snapshot:
        both = zip(astuple(self), astuple(other), strict=True)
        return Snapshot(*(now - before for now, before in both))

    @property
    def cold_share(self) -> float:
        """The part of what was read that came from the disk, and not from the page cache."""
        return min(1.0, self.disk_bytes / max(1, self.read_bytes))


@dataclass
class Peaks:
    """The most that was seen."""

    worker_bytes: int | None = None
    main_bytes: int | None = None
    shared_bytes: int = 0
    open_files: int = 0


class UsageWatch:
    """A thread that looks at this process and its children until it is told to stop."""

    def __init__(self) -> None:
        self.peaks = Peaks()
        self._stop = threading.Event()
        self._memory_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A last look included: a short probe may have had none."""
        if self._thread.is_alive() and not self._stop.is_set():
            self._stop.set()
            self._thread.join(_JOIN_SECONDS)
            self._memory_at = 0.0
            self._look()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        workers = children()
        shared, most = shared_memory([os.getpid(), *workers])
        self.peaks.shared_bytes = max(self.peaks.shared_bytes, shared)
        self.peaks.open_files = max(self.peaks.open_files, most)
        now = time.monotonic()
        if now - self._memory_at >= MEMORY_SECONDS:
            self._memory_at = now
            self._look_at_memory(workers)

    def _look_at_memory(self, workers: list[int]) -> None:
        for pid in workers:
            held = private_bytes(pid)
            if held:
                self.peaks.worker_bytes = max(self.peaks.worker_bytes or 0, held)
        own = private_bytes(os.getpid())
        if own is not None:
            self.peaks.main_bytes = max(self.peaks.main_bytes or 0, own)
