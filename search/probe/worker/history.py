"""The caching allocator's own history of a call. Needs CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch


def record_history(
    device: torch.device, call: Callable[[], object], stacks: Literal["python"] | None = None
) -> dict[str, Any]:
    """The allocator's snapshot after `call`, with all that happened meanwhile; with `stacks` also
    the lines of Python that asked for memory."""
    torch.cuda.synchronize(device)
    if stacks is None:
        torch.cuda.memory._record_memory_history(context=None)
    else:
        torch.cuda.memory._record_memory_history(context="all", stacks=stacks)
    try:
        call()
        torch.cuda.synchronize(device)
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return snapshot
