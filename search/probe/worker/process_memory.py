"""The memory of this process on the CPU: how much it holds, its peak, and a cap on its growth."""

from __future__ import annotations

import ctypes
import gc
import resource
from dataclasses import dataclass
from pathlib import Path

from planner.core.units import KIB

# What libraries reserve beside tensors and hardly touch. Measured: 20 to 30 MiB of oneDNN's code
# buffers in bf16 training of a four-block Swin (torch 2.13, AMD EPYC, 2026-11); none in fp32.
UNTOUCHED_BYTES = 64 * 1024 * KIB


@dataclass(frozen=True)
class Resident:
    """One reading of /proc/self/status, in bytes.

    `anonymous` and `file` are the parts of the resident set: what was allocated, and pages of
    programs and libraries. `peak` is the high-water mark of the whole, `data` the address space of
    private writable memory, which is what RLIMIT_DATA counts.
    """

    anonymous: int
    file: int
    peak: int
    data: int


def read_resident() -> Resident:
    """What this process holds now."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * KIB
    shared = fields["RssFile"] + fields["RssShmem"]
    return Resident(fields["RssAnon"], shared, fields["VmHWM"], fields["VmData"])


def reset_peak() -> bool:
    """Set the high-water mark to what is held now; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def settle() -> None:
    """Give back what is free, so that growth is counted from what is really held."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


class GrowthCap:
    """A wall for the growth of this process's own memory over a base, in bytes.

    RLIMIT_DATA counts private writable memory and makes the allocation that breaks it fail: an
    out-of-memory in the very operation that asked. It counts what was never touched, too, so the
    wall stands `UNTOUCHED_BYTES` behind the cap; between the two, the measured peak decides. Only
    the soft limit is set, so that it can be lifted.
    """

    def __init__(self, base: Resident, cap_bytes: int) -> None:
        self.limit = base.data + cap_bytes + UNTOUCHED_BYTES

    def impose(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = self.limit if hard == resource.RLIM_INFINITY else min(self.limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def lift(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
