"""A request for memory that failed, from torch's own message in the wordings of all its versions
(`failures.json` has them with their sources) or from a snapshot, and what follows from its figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from planner.core.failures import ANY_TORCH, SAID, WAYS_OUT, Versions, told
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import MAX_MEMORY_BYTES

_WORDED = SAID["allocator_message"]
_FIGURES = {  # sizes are bounded: a line of digits is read in time in proportion to it
    key: re.compile("|".join(patterns).replace("{size}", _WORDED["size"]))
    for key, patterns in _WORDED["figures"].items()
}
_WORDINGS = TypeAdapter(dict[str, Versions]).validate_python(_WORDED["wordings"])
# WSL's driver says 2^64 bytes of a process that it does not know (17179869184.00 GiB).
_MAX_TIMES_DEVICE = 16


@dataclass(frozen=True)
class FailedRequest:
    """What is known of one, in bytes by name: `requested_bytes`, and where it is told `total_bytes`
    and `free_bytes` of the `device`, `allocated_bytes` to tensors, `unused_bytes` that the
    allocator holds and no tensor uses, `private_pool_bytes`, `process_bytes` (all that this process
    holds, its context too), `other_bytes` (other processes) and `allowed_bytes` (a limit on the
    process). `torch` are the versions that word it so; `is_cuda` is false of ROCm's, XPU's, NPU's.
    """

    known: Mapping[str, int]
    torch: Versions = ANY_TORCH
    is_cuda: bool = True

    @property
    def held_bytes(self) -> int:
        return self.known.get("allocated_bytes", 0) + self.known.get("unused_bytes", 0)

    @property
    def figures(self) -> dict[str, int]:
        """And what follows from them, where it is not nonsense (on Windows torch may hold more than
        the device has, in the host's memory): what must be freed at least for the request, what
        could be free if this torch freed all, what is held outside of it, what of that this process
        holds beside it (the context, libraries), and the rest, which others do."""
        known, held = self.known, self.held_bytes
        allowed = max(known.get("allowed_bytes", MAX_MEMORY_BYTES) - held, 0)
        room = min(known.get("free_bytes", 0), allowed)
        found = {"missing_bytes": known["requested_bytes"] - room}
        if known.keys() >= {"allocated_bytes", "process_bytes"}:
            found["beside_bytes"] = known["process_bytes"] - held
        if known.keys() >= {"total_bytes", "free_bytes", "allocated_bytes"}:
            found["could_be_free_bytes"] = known["free_bytes"] + held
            found["outside_bytes"] = known["total_bytes"] - found["could_be_free_bytes"]
            if "other_bytes" not in known and "beside_bytes" in found:
                found["rest_bytes"] = found["outside_bytes"] - found["beside_bytes"]
        return {**known, **{key: value for key, value in found.items() if value > 0}}

    def ways_out(self, torch: Versions = ANY_TORCH) -> tuple[str, ...]:
        """What the figures say and advise, most certain first, to whoever has one of these."""
        figures = self.figures
        total = figures.get("total_bytes")
        bounds = {
            "limit_bytes": figures.get("allowed_bytes", total), "held_bytes": self.held_bytes,
            "joinable_bytes": figures.get("unused_bytes") if self.is_cuda else None,
            "noteworthy_bytes": noteworthy_bytes(total or figures.get("reserved_bytes", 0)),
        }  # fmt: skip
        return told(WAYS_OUT, torch, figures | bounds)


def read_message(text: str) -> FailedRequest | None:
    """The figures of the first message in `text`; None where there is none."""
    sizes = {key: list(map(_size, pattern.finditer(text))) for key, pattern in _FIGURES.items()}
    listed = sizes.pop("listed_bytes")
    found = {key: first[0] for key, first in sizes.items() if first}
    if "requested_bytes" not in found:
        return None
    if (reserved := found.pop("reserved_bytes", None)) is not None:
        found["unused_bytes"] = max(reserved - found.get("allocated_bytes", 0), 0)
    if found.get("process_bytes", 0) > _MAX_TIMES_DEVICE * found.get("total_bytes", 0):
        del found["process_bytes"]
    # torch lists processes by number; where none is called "this", the one that holds at least what
    # torch does is (in a container its number is another).
    if listed:
        held = FailedRequest(found).held_bytes
        own = [] if "process_bytes" in found else [size for size in listed if size >= held]
        if own:
            found["process_bytes"] = min(own)
        if "process_bytes" in found:
            found["other_bytes"] = sum(listed) - min(own, default=0)
    worded = (torch for pattern, torch in _WORDINGS.items() if re.search(pattern, text))
    return FailedRequest(found, next(worded, ANY_TORCH), "CUDA out of memory" in text)


def _size(match: re.Match[str]) -> int:
    """A size, or a number without a unit."""
    number, *unit = filter(None, match.groups())
    return int(float(number) * _WORDED["scale"]["".join(unit) or "B"])
