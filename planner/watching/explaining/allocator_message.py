"""torch's own message of an out-of-memory error, as its versions word it, and what follows from it.

Read in c10/cuda/CUDACachingAllocator.cpp: of 1.0 to 1.3 (`cached` is what is held and unused:
pytorch #13751), 1.4 to 2.0 (`reserved in total`; from 1.10 with advice of max_split_size_mb), 2.1
(`total capacty`), and since (`Process N has`, `private pools`: pytorch #124673). ROCm's build says
HIP in place of CUDA; XPU, NPU and MPS follow one or the other. `cudaMallocAsync` has a message of
its own, in lines (c10/cuda/CUDAMallocAsyncAllocator.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from planner.core.failures import ANY_TORCH, ON_FRAGMENTS, Versions
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import GIB, KIB, MIB, format_bytes
from planner.machine.hardware.overheads import CONTEXT_BYTES_HIGH

# Bounded, so that a line of digits is read in time that grows with its length only.
_SIZE = r"(?<![0-9.])([0-9]{1,20}(?:\.[0-9]{1,9})?)\s{0,3}(bytes|B|KiB|MiB|GiB|TiB|KB|MB|GB)"
_SCALE = {
    "bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB,
    "KB": KIB, "MB": MIB, "GB": GIB,
}  # fmt: skip
_DEVICE = re.compile(r"\b(?:GPU|NPU|XPU) (\d{1,6})(?:;| has a total)")
_HELD = re.compile(rf"{_SIZE} (reserved in total|cached)")
_OTHER = re.compile(rf"Process (\d{{1,20}}) has {_SIZE} memory in use")
_FIGURES = {
    "requested_bytes": rf"(?:Tried to allocate|Requested\s*:) {_SIZE}",
    "total_bytes": rf"{_SIZE} total capacity;|a total capaci?ty of {_SIZE}"
    rf"|Device limit\s*: {_SIZE}",
    "free_bytes": rf"{_SIZE} free;|of which {_SIZE} is free"
    rf"|Free \(according to CUDA\)\s*: {_SIZE}",
    "allocated_bytes": rf"{_SIZE} already allocated;|Of the allocated memory {_SIZE}"
    rf"|Currently allocated\s*: {_SIZE}",
    "unused_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "private_pool_bytes": rf"with {_SIZE} allocated in private pools",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "allowed_bytes": rf"{_SIZE} allowed;",
}
_PATTERNS = {key: re.compile(pattern) for key, pattern in _FIGURES.items()}
# WSL's driver says 2^64 bytes of a process that it does not know (17179869184.00 GiB).
_MAX_TIMES_DEVICE = 16


@dataclass(frozen=True)
class AllocatorMessage:
    """Bytes; None where the message says nothing of it.

    `free_bytes` is the device's, `unused_bytes` what the allocator holds and no tensor uses,
    `process_bytes` all that this process holds (its context too), `other_bytes` what other
    processes do, and `allowed_bytes` a limit that was set on the process. `torch` are the versions
    that word it so.
    """

    requested_bytes: int
    device: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    unused_bytes: int | None = None
    private_pool_bytes: int | None = None
    process_bytes: int | None = None
    other_bytes: int | None = None
    allowed_bytes: int | None = None
    torch: Versions = ANY_TORCH

    @property
    def held_bytes(self) -> int | None:
        """All that this torch holds."""
        if self.allocated_bytes is None:
            return None
        return self.allocated_bytes + (self.unused_bytes or 0)

    @property
    def missing_bytes(self) -> int | None:
        """What must be freed at least, so that the request can be met."""
        room = self.free_bytes or 0
        if self.allowed_bytes is not None:
            room = min(room, max(self.allowed_bytes - (self.held_bytes or 0), 0))
        return self.requested_bytes - room if self.requested_bytes > room else None

    @property
    def beside_bytes(self) -> int | None:
        """What this process holds beside its torch: the context, libraries."""
        if self.process_bytes is None or self.held_bytes is None:
            return None
        beside = self.process_bytes - self.held_bytes
        return beside if beside >= 0 else None

    @property
    def outside_bytes(self) -> int | None:
        """What is held outside of this torch; None also where it holds more than the device has (as
        on Windows, in the host's memory)."""
        if self.total_bytes is None or self.free_bytes is None or self.held_bytes is None:
            return None
        outside = self.total_bytes - self.free_bytes - self.held_bytes
        return outside if outside >= 0 else None

    @property
    def num_known(self) -> int:
        return sum(value is not None for value in asdict(self).values())

    def to_json(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if key != "torch"}
        found |= {
            "outside_bytes": self.outside_bytes, "beside_bytes": self.beside_bytes,
            "missing_bytes": self.missing_bytes,
        }  # fmt: skip
        return {key: value for key, value in found.items() if value is not None}


def read_message(text: str) -> AllocatorMessage | None:
    """The figures of the first message in `text`; None where there is none."""
    found: dict[str, int] = {}
    for key, pattern in _PATTERNS.items():
        if match := pattern.search(text):
            number, unit = (word for word in match.groups() if word is not None)
            found[key] = int(float(number) * _SCALE[unit])
    if "requested_bytes" not in found:
        return None
    if device := _DEVICE.search(text):
        found["device"] = int(device[1])
    torch = ANY_TORCH
    if held := _HELD.search(text):
        size, is_unused = int(float(held[1]) * _SCALE[held[2]]), held[3] == "cached"
        found["unused_bytes"] = (
            size if is_unused else max(size - found.get("allocated_bytes", 0), 0)
        )
        has_split = "max_split_size_mb" in text
        torch = ((1, 0), (1, 3)) if is_unused else ((1, 10) if has_split else (1, 4), (2, 0))
    elif "unused_bytes" in found or "memory in use" in text:
        torch = ((2, 1), ANY_TORCH[1])
    total = found.get("total_bytes", 0)
    if found.get("process_bytes", 0) > _MAX_TIMES_DEVICE * total:
        found.pop("process_bytes", None)
    found |= _of_processes(text, found)
    return AllocatorMessage(**found, torch=torch)


def _of_processes(text: str, found: dict[str, int]) -> dict[str, int]:
    """What other processes hold. torch lists processes by number; where none is called "this", the
    one that holds at least what torch does is (in a container its number is another)."""
    listed = [int(float(number) * _SCALE[unit]) for _, number, unit in _OTHER.findall(text)]
    if not listed:
        return {}
    if "process_bytes" in found:
        return {"other_bytes": sum(listed)}
    held = found.get("allocated_bytes", 0) + found.get("unused_bytes", 0)
    own = min((size for size in listed if size >= held), default=0)
    return {"process_bytes": own, "other_bytes": sum(listed) - own} if own else {}


def ways_out(message: AllocatorMessage, torch: Versions, is_cuda: bool = True) -> Iterator[str]:
    """What the figures say and advise, most certain first, to whoever has one of these torches."""
    requested, total, free = message.requested_bytes, message.total_bytes, message.free_bytes
    held, missing, limit = message.held_bytes, message.missing_bytes, message.allowed_bytes or total
    if limit is not None and requested > limit:
        yield (
            f"One request of {format_bytes(requested)} is larger than the device: only a smaller "
            "micro-batch, or another algorithm, makes it smaller."
        )
    elif held is not None and free is not None and requested > free + held:
        yield (
            f"Without everything that this torch holds, {format_bytes(free + held)} would be free, "
            f"less than the {format_bytes(requested)} asked for: nothing that it frees is enough."
        )
    yield from _of_others(message)
    if message.private_pool_bytes:
        yield on_private_pools(message.private_pool_bytes)
    unused = message.unused_bytes or 0
    if is_cuda and missing is not None and unused >= missing:
        yield from on_fragments(unused, requested, total, torch)
    if message.allowed_bytes is not None:
        yield f"The process was allowed {format_bytes(message.allowed_bytes)} only."
    if missing is not None:
        yield (
            f"Free at least {format_bytes(missing)} for this request; the rest of the step may "
            "need more."
        )
    elif free is not None:
        yield (
            f"The driver refused although it calls {format_bytes(free)} free: it keeps some back "
            "(as on Windows), or what is free is in pieces."
        )


def _of_others(message: AllocatorMessage) -> Iterator[str]:
    slack = noteworthy_bytes(message.total_bytes or 0)
    others, beside, outside = message.other_bytes, message.beside_bytes, message.outside_bytes
    held = f"Other processes hold {format_bytes(others or 0)}"
    if others is None and beside is not None and outside is not None:
        others = max(outside - beside, 0)
        who = "Other processes (on Windows the desktop and the driver too)"
        held = f"{who} hold {format_bytes(others)}"
    if others is None and outside is not None and outside > CONTEXT_BYTES_HIGH + slack:
        others, context = outside, format_bytes(CONTEXT_BYTES_HIGH)
        held = (
            f"{format_bytes(outside)} are held outside of this torch, of which a CUDA context is "
            f"at most about {context}; the rest is other processes', or other libraries'"
        )
    if others and others >= slack:
        lacked = message.missing_bytes
        enough = ", more than this request lacked" if lacked and others >= lacked else ""
        yield f"{held}{enough}: end them (nvidia-smi)."
    if beside is not None and beside > CONTEXT_BYTES_HIGH + slack:
        yield (
            f"This process holds {format_bytes(beside)} beside its torch, more than a CUDA "
            "context: NCCL's buffers, or another library in it (DALI, JAX, TensorFlow, CuPy)."
        )


def on_fragments(unused: int, requested: int, total: int | None, torch: Versions) -> Iterator[str]:
    """A word of what is reserved and unused, with a remedy that this torch has."""
    if unused < noteworthy_bytes(total or 0):
        return
    more = "more than the request" if unused >= requested else "less than the request"
    remedy = next(filter(None, (remedy.told(torch) for remedy in ON_FRAGMENTS)), "")
    yield (
        f"{format_bytes(unused)} are reserved but unused, {more}: free blocks that are too small "
        f"or of another pool. {remedy or 'This torch has no option against it; later ones do.'}"
    )


def on_private_pools(num_bytes: int) -> str:
    return (
        f"{format_bytes(num_bytes)} are in pools of CUDA graphs, which give nothing back: "
        "--compile default in place of reduce-overhead."
    )
