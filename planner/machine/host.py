"""What a machine offers a training beside its GPU: processors, memory, shared memory, limits.

Nothing is run: the kernel's files are read, below a root, so that a copy of another machine's can
be read as well. Control groups are read in both versions (Linux,
Documentation/admin-guide/cgroup-v2.rst: cpu.max, memory.max; cgroup-v1: cpu.cfs_quota_us,
memory.limit_in_bytes).
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED_V1 = 1 << 60  # cgroup v1 says "no limit" with a number near 2^63
# The files with the limit of a control group's memory and with what it uses, in either version.
_MEMORY_FILES = (
    ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)  # fmt: skip


@dataclass(frozen=True)
class Host:
    """The machine as this process may use it. Sizes in bytes; None where the system does not say,
    or sets no limit.

    `memory_bytes` is all of `memory_room`. This process may run on `usable_cpus`; its control group
    may take the time of `quota_cpus` processors.
    """

    num_cpus: int
    usable_cpus: int
    quota_cpus: float | None = None
    memory_bytes: int | None = None
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    container: str | None = None

    @property
    def cpus(self) -> float:
        """How many processors this process can keep busy."""
        return min(self.usable_cpus, self.quota_cpus or self.usable_cpus)


def read_host(root: Path = ROOT) -> Host:
    """This machine; below another `root`, what the files there say."""
    shared, shared_free = _shared_memory(root)
    return Host(
        num_cpus=os.cpu_count() or 1,
        usable_cpus=usable_cores(),
        quota_cpus=_quota(root),
        memory_bytes=memory_room(root)[0],
        shared_memory_bytes=shared,
        shared_memory_free_bytes=shared_free,
        container=_container(root),
    )


def text_of(path: Path) -> str:
    """The text of a file of the kernel; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """The whole number in a file of the kernel; None where there is none."""
    text = text_of(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _group_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and of those above it, innermost first."""
    base = root / "sys/fs/cgroup"
    folders = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top = base
        elif controller in controllers.split(","):
            top = base / controllers if (base / controllers).is_dir() else base / controller
        else:
            continue
        inner = top / path.lstrip("/")
        while inner != top and top in inner.parents:
            folders.append(inner)
            inner = inner.parent
        folders.append(top)
    return folders or [base, base / controller]


def _quota(root: Path) -> float | None:
    """The lowest quota of this process's control groups, in processors."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
        old = number_of(folder / "cpu.cfs_quota_us")
        length = number_of(folder / "cpu.cfs_period_us")
        if old and length and old > 0:
            quotas.append(old / length)
    return min(quotas, default=None)


def _cached_bytes(folder: Path) -> int:
    lines = text_of(folder / "memory.stat").splitlines()
    counts = dict(line.split()[:2] for line in lines if line)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def memory_room(root: Path = ROOT) -> tuple[int, int]:
    """(all, free) bytes of memory for this process, within the limits of its control groups. Free
    memory can be had now without swapping; it includes a group's cached files, which the group
    gives back when needed."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder in _group_folders(root, "memory"):
        for limited, used in _MEMORY_FILES:
            limit, taken = number_of(folder / limited), number_of(folder / used) or 0
            if limit is not None and 0 < limit < _UNLIMITED_V1:
                left = max(0, limit - max(0, taken - _cached_bytes(folder)))
                total, free = min(total, limit), min(free, left)
    return total, free


def _shared_memory(root: Path) -> tuple[int | None, int | None]:
    """All and free bytes of /dev/shm, in which workers of a DataLoader hand over batches."""
    try:
        system = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):
        return None, None
    return system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize


def _container(root: Path) -> str | None:
    """The kind of container that this process runs in; None outside of one."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    if os.environ.get("APPTAINER_CONTAINER") or (root / ".singularity.d").exists():
        return "apptainer"
    groups = text_of(root / "proc/1/cgroup") or ""
    for name in ("kubepods", "docker", "lxc", "containerd"):
        if name in groups:
            return name
    return None


def cpu_name() -> str:
    """The processor and the threads that torch uses on it: "AMD EPYC, 2 threads"."""
    # In the order in which torch reads them (aten/src/ATen/ParallelCommon.cpp).
    variables = (os.environ.get(name, "") for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    count = next((int(threads) for threads in variables if threads.isdigit()), usable_cores())
    return f"{_cpu_model()}, {count} thread{'' if count == 1 else 's'}"


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    text = text_of(ROOT / "proc/cpuinfo")
    match = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine() or "CPU"
