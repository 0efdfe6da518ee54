"""The memory that a search's settings may take."""

from dataclasses import dataclass

from planner.core.errors import UsageError
from planner.core.schema import DeviceInfo
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import format_bytes
from search.loop.options import SearchOptions
from search.probe.device import MemoryInUse


@dataclass(frozen=True)
class MemoryBudget:
    """The memory to search in: the bytes that a setting may take, the cap of a probe (None: none),
    and notes."""

    budget_bytes: int | None
    cap_bytes: int | None
    notes: tuple[str, ...]


def find_budget(
    device: DeviceInfo, in_use: MemoryInUse | None, options: SearchOptions, ranks: int = 1
) -> MemoryBudget:
    """The memory for a setting: the device's or the emulated size, less what other processes hold
    (`in_use`, None where that is not known) and the headroom. On the CPU `ranks` share it."""
    total = in_use.total_bytes if in_use else device.total_bytes
    used = in_use.used_bytes if in_use else 0
    free = in_use.free_bytes if in_use else total
    notes, which = [], " of this machine's memory" if device.kind == "cpu" else ""
    if used > noteworthy_bytes(total):
        notes.append(
            f"Other processes hold {format_bytes(used)} of {format_bytes(total)}{which}: "
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
    if device.kind == "cpu":
        notes.append("Memory on the CPU is the growth of the worker's peak resident set.")
    budget = less_headroom(limit, options.headroom)
    notes.append(f"Settings may take {format_bytes(budget)} ({options.headroom:.0%} kept free).")
    capped = options.memory_bytes is not None or device.kind == "cpu"
    return MemoryBudget(budget, limit if capped else None, tuple(notes))


def less_headroom(limit_bytes: int, headroom: float) -> int:
    """The bytes of `limit_bytes` that a setting may take. Raises UsageError where there are
    none."""
    budget = int(limit_bytes * (1 - headroom))
    if budget <= 0:
        raise UsageError(
            f"no memory is left to search in: {format_bytes(limit_bytes)} less {headroom:.0%}.",
            "Free the device of other processes, or lower --headroom.",
        )
    return budget
