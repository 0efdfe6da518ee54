"""torch's own message of an out-of-memory error, as its versions word it.

Read in c10/cuda/CUDACachingAllocator.cpp: of 1.0 to 1.3 (`cached` is what is held and unused:
pytorch #13751), 1.4 to 2.0 (`reserved in total`), 2.1 (`total capacty`), and since (`Process N
has`, `private pools`: pytorch #124673). ROCm's build says HIP in place of CUDA; XPU, NPU and MPS
follow one or the other. `cudaMallocAsync` has a message of its own, in lines
(c10/cuda/CUDAMallocAsyncAllocator.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.core.units import GIB, KIB, MIB

# Bounded, so that a line of digits is read in time that grows with its length only.
_SIZE = r"(?<![0-9.])([0-9]{1,20}(?:\.[0-9]{1,9})?)\s{0,3}(bytes|B|KiB|MiB|GiB|TiB|KB|MB|GB)"
_SCALE = {
    "bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB,
    "KB": KIB, "MB": MIB, "GB": GIB,
}  # fmt: skip
_REQUESTED = re.compile(rf"(?:Tried to allocate|Requested\s*:) {_SIZE}")
_OLD = re.compile(
    rf"GPU (\d{{1,6}}); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; "
    rf"(?:{_SIZE} allowed; )?{_SIZE} (reserved|cached)"
)
_CAPACITY = re.compile(
    rf"GPU (\d{{1,6}}) has a total capaci?ty of {_SIZE} of which {_SIZE} is free"
)
_OTHER = re.compile(rf"Process (\d{{1,20}}) has {_SIZE} memory in use")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_ALLOCATED = re.compile(rf"(?:Of the allocated memory|Currently allocated\s*:) {_SIZE}")
_POOLS = re.compile(rf"with {_SIZE} allocated in private pools")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_LIMIT = re.compile(rf"Device limit\s*: {_SIZE}")
_FREE = re.compile(rf"Free \(according to CUDA\)\s*: {_SIZE}")


@dataclass(frozen=True)
class AllocatorMessage:
    """Bytes; None where the message says nothing of it.

    `free_bytes` is the device's, `unused_bytes` what the allocator holds and no tensor uses,
    `process_bytes` all that this process holds (its context too), `other_bytes` what other
    processes do, and `allowed_bytes` a limit that was set on the process.
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

    @property
    def missing_bytes(self) -> int:
        """What must be freed at least, so that the request can be met."""
        room = self.free_bytes or 0
        if self.allowed_bytes is not None:
            held = (self.allocated_bytes or 0) + (self.unused_bytes or 0)
            room = min(room, max(self.allowed_bytes - held, 0))
        return max(self.requested_bytes - room, 1)

    @property
    def num_known(self) -> int:
        return sum(value is not None for value in asdict(self).values())

    def to_json(self) -> dict[str, Any]:
        return {
            **{key: value for key, value in asdict(self).items() if value is not None},
            "missing_bytes": self.missing_bytes,
        }


def read_message(text: str) -> AllocatorMessage | None:
    """The figures of the first message in `text`; None where there is none."""
    requested = _REQUESTED.search(text)
    if requested is None:
        return None
    found = _old_figures(text) or _new_figures(text)
    return AllocatorMessage(requested_bytes=_bytes(*requested.groups()), **found)


def _old_figures(text: str) -> dict[str, int | None]:
    old = _OLD.search(text)
    if old is None:
        return {}
    words = old.groups()
    total, allocated, free, allowed, held = (
        _bytes(words[i], words[i + 1]) if words[i] else None for i in range(1, 11, 2)
    )
    assert allocated is not None
    assert held is not None
    is_unused = words[11] == "cached"
    return {
        "device": int(words[0]),
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": allocated,
        "allowed_bytes": allowed,
        "unused_bytes": held if is_unused else max(held - allocated, 0),
    }


def _new_figures(text: str) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    capacity = _CAPACITY.search(text)
    if capacity is not None:
        device, *sizes = capacity.groups()
        found |= {
            "device": int(device),
            "total_bytes": _bytes(*sizes[:2]),
            "free_bytes": _bytes(*sizes[2:]),
        }
    patterns = {
        "process_bytes": _OWN, "allowed_bytes": _ALLOWED, "allocated_bytes": _ALLOCATED,
        "private_pool_bytes": _POOLS, "unused_bytes": _UNUSED,
        "total_bytes": _LIMIT, "free_bytes": _FREE,
    }  # fmt: skip
    for key, pattern in patterns.items():
        match = pattern.search(text)
        if match is not None:
            found[key] = _bytes(*match.groups())
    return found | _of_processes(text, found)


def _of_processes(text: str, found: Mapping[str, int | None]) -> dict[str, int]:
    """What other processes hold. torch lists processes by number; where none is called "this", the
    one that holds at least what torch does is (in a container its number is another)."""
    listed = [_bytes(*match[1:]) for match in (m.groups() for m in _OTHER.finditer(text))]
    if not listed:
        return {}
    if found.get("process_bytes") is not None:
        return {"other_bytes": sum(listed)}
    held = (found.get("allocated_bytes") or 0) + (found.get("unused_bytes") or 0)
    own = min((n for n in listed if n >= held), default=0)
    return {"process_bytes": own, "other_bytes": sum(listed) - own} if own else {}


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _SCALE[unit])
