"""How a failure is recognised and told: the one place that reads the text of errors."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

# An allocation that failed outside of torch's caching allocator has only its text.
_ALLOCATION_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
    "std::bad_alloc",  # C++ operator new, as the runtime's terminate handler prints it
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, raised by a library or a kernel
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS handle or workspace
    "CUDNN_STATUS_ALLOC_FAILED",
)
# oneDNN has one text for a primitive whose code or scratchpad found no memory; one that does not
# exist is "could not create a primitive descriptor …".
_ONEDNN_TEXT = re.compile(r"could not create a primitive\s*$", re.MULTILINE)
# Frames of a fatal signal that are worth keeping: the innermost ones come first.
_FATAL_LINES = 6
_LAST_LINES = 5
_MESSAGE_CHARACTERS = 1500


def is_allocation_failure(text: str) -> bool:
    """Whether an error's text says that memory could not be had."""
    return any(known in text for known in _ALLOCATION_TEXTS) or bool(_ONEDNN_TEXT.search(text))


def last_words(stderr: str) -> str:
    """The lines of a dead worker's standard error that say why, newest last, shortened."""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = fatal[-1] if fatal else max(0, len(lines) - _LAST_LINES)
    kept = lines[first : first + _FATAL_LINES]
    return "\n".join(kept)[-_MESSAGE_CHARACTERS:]


def describe_exit(wait_status: int) -> str:
    """`exit status 3`, or `SIGSEGV (Segmentation fault)`."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"{name} ({signal.strsignal(number) or 'unknown'})"
    return f"exit status {os.waitstatus_to_exitcode(wait_status)}"


def count_kernel_kills() -> int | None:
    """How many processes the kernel has killed for memory since boot; None where it is not told."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None
