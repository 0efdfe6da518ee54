"""What is kept of a training that runs out of memory: a snapshot of the allocator, in a file.

torch tells observers of an out-of-memory error while everything is still alive. An observer cannot
be taken away again, so one is attached for each process, and it asks who watches now.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from planner.core.failures import is_allocation_failure

MAX_SNAPSHOTS = 3  # of one run: a loop may catch the error and go on

Observer = Callable[[dict[str, Any]], None]
_watching: list[weakref.WeakMethod[Observer]] = []
_attached_in: int | None = None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Of the device or of the host, by its type or its text."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_allocation_failure(str(error))


def observe(observer: Observer) -> bool:
    """Call `observer` (a bound method) at every out-of-memory error of CUDA's from now on. False
    where CUDA is not in use yet, or this torch has no such hook."""
    global _attached_in
    if not torch.cuda.is_initialized() or not hasattr(
        torch._C, "_cuda_attach_out_of_memory_observer"
    ):
        return False
    if _attached_in != os.getpid():
        torch._C._cuda_attach_out_of_memory_observer(_tell)
        _attached_in = os.getpid()
    _watching[:] = [known for known in _watching if known() is not None]
    _watching.append(weakref.WeakMethod(observer))
    return True


def _tell(device: int, requested: int, total: int, free: int) -> None:
    figures = {
        "device": device, "requested_bytes": requested, "total_bytes": total, "free_bytes": free,
    }  # fmt: skip
    for reference in _watching:
        observer = reference()
        if observer is not None:
            observer(figures)


def record_history(entries: int) -> None:
    """Let the allocator remember its last `entries` events with Python's stacks."""
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=entries
    )


def save_snapshot(path: Path) -> Path | None:
    """What is alive now and who asked for it, as far as a history is on; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    return path
