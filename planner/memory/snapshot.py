"""A snapshot of torch's caching allocator, read from a file that anybody may have written."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from planner.core.errors import MAX_SHOWN, PlannerError
from planner.core.units import MIB, format_bytes

SNAPSHOT_ENDINGS = (".pickle", ".pkl")
MAX_SNAPSHOT_BYTES = 4096 * MIB  # unpacked
# What its values take of Python's memory, per byte of a pickle: 8 to 9 for torch's (measured on
# CPython 3.11, 100,000 events). A few bytes of a forged one ask for 4 GiB.
_BYTES_PER_BYTE, _FLOOR_BYTES = 24, 256 * MIB


def read_pickle(file: IO[bytes], name: str) -> dict[str, Any]:
    """A snapshot that was dumped as `name`. It is made of plain values, and nothing else is let in:
    reading a pickle from elsewhere runs no code, and takes memory in proportion to its length only.
    Raises PlannerError, OSError."""
    data = _read_whole(file, name)
    size = format_bytes(len(data.getbuffer()))
    try:
        with _memory_limited(_BYTES_PER_BYTE * len(data.getbuffer()) + _FLOOR_BYTES):
            snapshot = _PlainUnpickler(data).load()
    except MemoryError:
        raise unreadable(name, f"its {size} ask for more memory than they can fill") from None
    except Exception as error:  # of damaged ones pickle's manual names no complete list
        raise unreadable(name, f"{type(error).__name__}: {error}"[:MAX_SHOWN]) from None
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise PlannerError(
            f"{name} holds no memory snapshot.",
            "Write one with torch.cuda.memory._dump_snapshot(path).",
        )
    return snapshot


def _read_whole(file: IO[bytes], name: str) -> io.BytesIO:
    data = io.BytesIO()
    while part := file.read(MIB):
        if data.tell() + len(part) > MAX_SNAPSHOT_BYTES:
            raise PlannerError(
                f"{name} is larger than {format_bytes(MAX_SNAPSHOT_BYTES)}.",
                "Record a shorter history: max_entries of _record_memory_history().",
            )
        data.write(part)
    data.seek(0)
    return data


@contextmanager
def _memory_limited(num_bytes: int) -> Iterator[None]:
    """Within, the process gets this much more memory at most. Linux only: elsewhere no limit."""
    try:
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    limits = [held + num_bytes, *(n for n in (soft, hard) if n != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def unreadable(name: str, reason: object) -> PlannerError:
    return PlannerError(
        f"{name} cannot be read as a memory snapshot: {reason}",
        "Write one with torch.cuda.memory._dump_snapshot(path).",
    )


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
