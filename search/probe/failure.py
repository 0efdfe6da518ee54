"""How a probe's end is judged and told. What errors say is known to `planner.core.failures`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

from planner.core.failures import is_allocation_failure
from planner.core.schema import MeasurementRecord

CONTRACT = "contract"  # the phase of a probe that ended since a step is not what its task says
# Frames of a fatal signal that are worth keeping: the innermost ones come first.
_FATAL_LINES = 6
_LAST_LINES = 5
_MESSAGE_CHARACTERS = 1500
_FIRST_LINE_CHARACTERS = 500


def shorten(text: str) -> str:
    """A long text by its first line, which names the error, and its end, which says where."""
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    first = text.split("\n", 1)[0][:_FIRST_LINE_CHARACTERS]
    return f"{first}\n…\n{text[len(first) + 3 - _MESSAGE_CHARACTERS :]}"


def broke_contract(record: MeasurementRecord) -> bool:
    """Whether the model or its task must change for a probe to end well, and not the setting."""
    return record.status == "unsupported" and getattr(record, "phase", "") == CONTRACT


def last_words(stderr: str) -> str:
    """The lines of a dead worker's standard error that say why, newest last, shortened.

    What the C++ runtime says of an exception that nobody caught stands before the "Fatal Python
    error", and its backtrace between the two.
    """
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = fatal[-1] if fatal else max(0, len(lines) - _LAST_LINES)
    uncaught = [i for i, line in enumerate(lines[:first]) if line.startswith("terminate called")]
    kept = lines[uncaught[-1] : min(uncaught[-1] + 2, first)] if uncaught else []
    return shorten("\n".join([*kept, *lines[first : first + _FATAL_LINES]]))


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


def judge_death(
    wait_status: int, words: str, kills_before: int | None
) -> tuple[Literal["out_of_memory", "crashed"], str]:
    """What became of a worker that ended without an answer, and its message: from its status, the
    last words of its standard error, and how many processes the kernel had killed before."""
    said = describe_exit(wait_status)
    if is_allocation_failure(words):
        return "out_of_memory", f"{said}\n{words}"
    killed = os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == signal.SIGKILL
    if killed and kernel_ran_out(kills_before):
        return "out_of_memory", "the kernel killed it: the machine is out of memory"
    return "crashed", f"{said}\n{words}".strip()


def count_kernel_kills() -> int | None:
    """How many processes the kernel has killed for memory since boot; None where it is not told."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def kernel_ran_out(kills_before: int | None) -> bool:
    """Whether a SIGKILL that was not ours was the kernel's: its count of such kills has risen.

    Where the kernel keeps no count, memory is by far the likeliest reason.
    """
    kills = count_kernel_kills()
    return kills is None or kills_before is None or kills > kills_before
