"""The processor of this machine, as records and kept rates name it: no torch."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def cpu_name() -> str:
    """The processor and the threads that computing on it takes: "AMD EPYC, 2 threads"."""
    # In the order in which torch heeds them (aten/src/ATen/ParallelCommon.cpp).
    said = (os.environ.get(name, "") for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    count = next((int(threads) for threads in said if threads.isdigit()), usable_cores())
    return f"{_cpu_model()}, {count} thread{'' if count == 1 else 's'}"


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine() or "CPU"
