"""A Chrome trace that torch.profiler wrote, read back: operations, kernels, launches and marks.

Times are seconds on the trace's own clock. The fields are those of kineto's `output_json.cpp`:
`correlation`, `Sequence number`, `Fwd thread id`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError
from search.probe.protocol import PROFILE_MARK

# Categories of events: kineto, libkineto/src/ActivityType.cpp.
_HOST_OPERATIONS = ("cpu_op", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Event:
    """Something that took from `start` to `end`. `thread` is the host's thread or the device's
    stream; `link` ties a launch to its kernel. `records_grad` says that autograd was recording: in
    backward, that it is computed again."""

    name: str
    start: float
    end: float
    thread: str
    link: int | None = None
    records_grad: bool = False


@dataclass(frozen=True)
class Trace:
    """`operations` and `launches` are the host's, `kernels` the device's, empty on a CPU. `marks`
    are the phases of the steps, in order."""

    operations: tuple[Event, ...]
    launches: tuple[Event, ...]
    kernels: tuple[Event, ...]
    marks: tuple[Event, ...]


def read_trace(file: Path) -> Trace:
    """Raises PlannerError where it is no whole trace: a full disk leaves a piece of one."""
    try:
        data = file.read_bytes()
        found = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
        return trace_of(found["traceEvents"])
    except OSError as error:
        raise PlannerError(f"{file} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise PlannerError(f"{file} is no whole trace of torch.profiler: {error}.") from None


def trace_of(entries: Iterable[Mapping[str, Any]]) -> Trace:
    """The events of a Chrome trace that have a duration."""
    by_category: dict[str, list[Event]] = {}
    for entry in entries:
        if entry.get("ph") == "X":
            category = str(entry.get("cat", "")).lower()
            by_category.setdefault(category, []).append(_event(entry))

    def chosen(categories: Iterable[str]) -> tuple[Event, ...]:
        found = [event for name in categories for event in by_category.get(name, ())]
        return tuple(sorted(found, key=lambda e: (e.start, -e.end)))

    operations = chosen(_HOST_OPERATIONS)
    return Trace(
        operations=tuple(e for e in operations if not e.name.startswith(PROFILE_MARK)),
        launches=chosen(_LAUNCHES),
        kernels=chosen(_ON_DEVICE),
        marks=tuple(e for e in operations if e.name.startswith(PROFILE_MARK)),
    )


def _event(entry: Mapping[str, Any]) -> Event:
    given = entry.get("args") or {}
    start = float(entry["ts"]) * _MICROSECOND
    return Event(
        name=str(entry["name"]),
        start=start,
        end=start + float(entry.get("dur", 0.0)) * _MICROSECOND,
        thread=f"{entry.get('pid')}/{entry.get('tid')}",
        link=given.get("correlation"),
        # Nodes of backward carry the thread of their forward, and a number too.
        records_grad="Sequence number" in given and not given.get("Fwd thread id"),
    )
