"""What the processes of a loader take: processor time, memory, files, disk.

Bytes are integers, times are seconds. Linux only; what is not told is None.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from planner.core.units import MIB
from search.probe.processes import children, cpu_seconds

# How often processes are looked at. Their memory is read less often: the kernel walks their pages.
LOOK_SECONDS = 0.1
MEMORY_SECONDS = 0.5
_JOIN_SECONDS = 2.0
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's block
# A worker whose memory rises by more than this share and these bytes in the second half of the
# probe, and in each third of all readings, leaks. Judgements: Python's reference counts touch pages
# that were shared at the fork, which is over once every object was met.
_LEAK_SHARE, _LEAK_BYTES = 0.05, 8 * MIB
_LEAST_READINGS = 6


def private_bytes(pid: int) -> int | None:
    """What is the process's own and would be free without it (USS); None where it is not told."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return None


@dataclass(frozen=True)
class Disk:
    """What a process has read: by calls, and of that from the disk and not the page cache."""

    read_bytes: int = 0
    disk_bytes: int = 0

    def __add__(self, other: Disk) -> Disk:
        return Disk(self.read_bytes + other.read_bytes, self.disk_bytes + other.disk_bytes)

    def __sub__(self, other: Disk) -> Disk:
        return Disk(self.read_bytes - other.read_bytes, self.disk_bytes - other.disk_bytes)


def read_disk(pid: int) -> Disk:
    """Zeros where it is not told."""
    try:
        found = psutil.Process(pid).io_counters()
    except psutil.Error:
        return Disk()
    return Disk(found.read_chars, found.read_bytes)


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
    """What this process and its children have used so far: processor seconds, bytes read."""

    main_cpu: float
    worker_cpu: float
    disk: Disk

    @classmethod
    def take(cls) -> Snapshot:
        disk = read_disk(os.getpid())
        worker_cpu = 0.0
        for pid in children():
            disk += read_disk(pid)
            worker_cpu += cpu_seconds(pid)
        return cls(time.process_time(), worker_cpu, disk)

    def __sub__(self, other: Snapshot) -> Snapshot:
        return Snapshot(
            self.main_cpu - other.main_cpu,
            self.worker_cpu - other.worker_cpu,
            self.disk - other.disk,
        )

    @property
    def cold_share(self) -> float:
        """The part of what was read that came from the disk, and not from the page cache."""
        return min(1.0, self.disk.disk_bytes / max(1, self.disk.read_bytes))


@dataclass
class Peaks:
    """The most that was seen, and how the memory of each process that loads went, from one reading
    to the next."""

    worker_bytes: int | None = None
    main_bytes: int | None = None
    shared_bytes: int = 0
    open_files: int = 0
    history: dict[int, list[int]] = field(default_factory=dict)

    def flags(self) -> list[str]:
        """One for a process whose memory grows steadily."""
        growths = [growth for seen in self.history.values() if (growth := steady_growth(seen))]
        if not growths:
            return []
        share, num_bytes = max(growths)
        return [
            f"the memory of a process that loads grows: {num_bytes / MIB:+.0f} MiB ({share:+.0%}) "
            "in the second half of the probe. Does the Dataset keep what it has loaded?"
        ]


def steady_growth(readings: list[int]) -> tuple[float, int] | None:
    """(share, bytes) of the growth in the second half, where memory rises from third to third and
    by enough to matter; else None."""
    if len(readings) < _LEAST_READINGS:
        return None
    third = len(readings) // 3
    means = [sum(part) / len(part) for part in (
        readings[:third], readings[third:-third], readings[-third:]
    )]  # fmt: skip
    middle = readings[len(readings) // 2]
    growth = readings[-1] - middle
    if not means[0] < means[1] < means[2] or growth < max(_LEAK_BYTES, _LEAK_SHARE * middle):
        return None
    return growth / middle, growth


class UsageWatch:
    """A thread that looks at this process and its children until it is told to stop."""

    def __init__(self) -> None:
        self.peaks = Peaks()
        self._stop = threading.Event()
        self._memory_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Peaks:
        """The peaks, a last look included: a short probe may have had none."""
        if self._thread.is_alive() and not self._stop.is_set():
            self._stop.set()
            self._thread.join(_JOIN_SECONDS)
            self._memory_at = 0.0
            self._look()
        return self.peaks

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
                self.peaks.history.setdefault(pid, []).append(held)
                self.peaks.worker_bytes = max(self.peaks.worker_bytes or 0, held)
        own = private_bytes(os.getpid())
        if own is not None:
            self.peaks.main_bytes = max(self.peaks.main_bytes or 0, own)
        if own and not workers:  # it loads itself
            self.peaks.history.setdefault(os.getpid(), []).append(own)
