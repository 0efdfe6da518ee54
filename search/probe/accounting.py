"""What is believed of the figures that drivers give of memory: no torch, no driver here.

A figure is believed where it agrees with what the caching allocator knows for certain. In
containers the driver may know this process by another id, or by the right one with 0 bytes; what
the whole device's use grew by follows other processes too; and with paging (WSL) a process may
hold more than the device has.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.core.units import GIB, MIB
from planner.machine.hardware.overheads import CONTEXT_BYTES

# What a process holds of a GPU beside the caching allocator's segments is within these: contexts of
# 287 to 667 MB are reported, and kernels that are loaded and recorded graphs add to them.
CONTEXT_LOW_BYTES, CONTEXT_HIGH_BYTES = 100 * MIB, 2 * GIB
# How far NVML's total less its reserve and CUDA's total may lie apart for one device.
SAME_TOTAL_SHARE = 0.05
# What a context may have grown by since it was measured, while others' share is told by difference.
CONTEXT_GROWTH_BYTES = 512 * MIB


@dataclass(frozen=True)
class Reading:
    """One look at a device, in bytes: `reserved` by our caching allocator, `used` by all, `own`
    what the driver counts for our process; None where nobody says."""

    reserved: int
    used: int | None = None
    own: int | None = None


@dataclass(frozen=True)
class Context:
    """What a process holds of the device outside of the caching allocator, and how it is known."""

    num_bytes: int
    source: str


def agree(nvml_total: int, torch_total: int) -> bool:
    """Whether two totals can be of one device. A card split by MIG, or another card, is neither."""
    return abs(nvml_total - torch_total) <= SAME_TOTAL_SHARE * max(nvml_total, torch_total)


def measure_context(used_before: int | None, now: Reading) -> Context:
    """The context just made: by the driver's figure for this process, else by what the device's
    use grew by; where neither is plausible, as assumed in estimates."""
    figures = (
        ("the driver's figure for this process", _own_beside(now)),
        ("what the device's use grew by", _grown_beside(used_before, now)),
    )
    for source, num_bytes in figures:
        if num_bytes is not None and CONTEXT_LOW_BYTES <= num_bytes <= CONTEXT_HIGH_BYTES:
            return Context(num_bytes, source)
    return Context(CONTEXT_BYTES, "assumed: the driver's figures are not plausible")


def process_bytes(
    context: Context, peak_reserved: int, used_before: int | None, now: Reading
) -> int:
    """What the driver gave up to this process at its peak: peak reserved, and what lies beside.

    What lies beside grows with the kernels that are loaded, so it is read again; a figure for the
    process itself counts whatever it is, a difference only where it is plausible.
    """
    beside = [context.num_bytes]
    own, grown = _own_beside(now), _grown_beside(used_before, now)
    if own is not None:
        beside.append(own)
    elif grown is not None and grown <= CONTEXT_HIGH_BYTES:
        beside.append(grown)
    return peak_reserved + max(beside)


def others_bytes(context: Context, now: Reading) -> int | None:
    """What other processes hold, at least; None where nobody says what is used."""
    if now.used is None:
        return None
    beside = _own_beside(now)
    if beside is None:
        beside = context.num_bytes + CONTEXT_GROWTH_BYTES
    return max(0, now.used - now.reserved - beside)


def _own_beside(now: Reading) -> int | None:
    """The driver's figure for us less what is reserved; None where it is less than that, or more
    than is used of the device by all."""
    if now.own is None or now.own <= now.reserved:
        return None
    if now.used is not None and now.own > now.used:
        return None
    return now.own - now.reserved


def _grown_beside(used_before: int | None, now: Reading) -> int | None:
    if used_before is None or now.used is None:
        return None
    return now.used - used_before - now.reserved
