"""How much memory a search has for a setting."""

from __future__ import annotations

from dataclasses import dataclass

from planner.core.errors import UsageError
from planner.core.schema import DeviceInfo
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import format_bytes
from planner.machine.hardware import recognise_gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.allocator_config import AllocatorConfig
from search.loop.options import SearchOptions
from search.probe.device import MemoryInUse


@dataclass(frozen=True)
class MemoryBudget:
    """The memory to search in: bytes a setting may take, what a probe is capped to (None: not), and
    what is to be said about it."""

    budget_bytes: int | None
    cap_bytes: int | None
    notes: tuple[str, ...]


def find_budget(
    device: DeviceInfo,
    in_use: MemoryInUse | None,
    options: SearchOptions,
    allocator: AllocatorConfig | None = None,
    ranks: int = 1,
) -> MemoryBudget:
    """What memory there is for a setting: of the device or the size emulated, less what other
    processes hold (`in_use`, None where nobody says) and the headroom. A memory fraction among the
    `allocator`'s options lowers it. `ranks` on the CPU share its memory."""
    total = in_use.total_bytes if in_use else device.total_bytes
    used = in_use.used_bytes if in_use else 0
    free = in_use.free_bytes if in_use else total
    notes, what = [], " of this machine's memory" if device.kind == "cpu" else ""
    if used > noteworthy_bytes(total):
        notes.append(
            f"Other processes hold {format_bytes(used)} of {format_bytes(total)}{what}: "
            f"{format_bytes(free)} are left."
        )
    if device.kind == "cpu" and ranks > 1:
        free //= ranks
        notes.append(f"{ranks} ranks share this machine's memory: {format_bytes(free)} each.")
    limit = free
    if options.memory_bytes is not None:
        limit = min(free, options.memory_bytes)
        asked = format_bytes(options.memory_bytes)
        notes.append(
            f"Capped to {asked}: this emulates a smaller device, whose speed and context are its "
            "own."
            if options.memory_bytes < total
            else f"--memory {asked} caps nothing: this device has {format_bytes(total)}."
        )
    allowed = allocator.allowed_bytes(device.total_bytes) if allocator is not None else None
    if allowed is not None:  # it binds what is reserved: the CUDA context comes on top
        allowed += overheads_for(recognise_gpu(device.name, device.total_bytes)).context_bytes
    if allowed is not None and allowed < limit:
        limit = allowed
        notes.append(
            f"per_process_memory_fraction leaves {format_bytes(limit)}, the CUDA context included."
        )
    if device.kind == "cpu":
        notes.append("Memory on the CPU is the growth of the worker's peak resident set.")
    budget = less_headroom(limit, options.headroom)
    notes.append(f"Settings may take {format_bytes(budget)} ({options.headroom:.0%} kept free).")
    capped = options.memory_bytes is not None or device.kind == "cpu"
    return MemoryBudget(budget, limit if capped else None, tuple(notes))


def less_headroom(limit_bytes: int, headroom: float) -> int:
    """What a setting may take of `limit_bytes`. Raises UsageError where that is nothing."""
    budget = int(limit_bytes * (1 - headroom))
    if budget <= 0:
        raise UsageError(
            f"no memory is left to search in: {format_bytes(limit_bytes)} less {headroom:.0%}.",
            "Free the device of other processes, or lower --headroom.",
        )
    return budget
