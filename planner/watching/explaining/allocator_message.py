"""torch's own message of an out-of-memory error, in the wordings of all its versions
(`failures.json` has them with their sources), and what follows from its figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.core.failures import ANY_TORCH, ON_FRAGMENTS, SAID, Versions, sentence, versions_of
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import GIB, MAX_MEMORY_BYTES

_WORDED = SAID["allocator_message"]
_SCALE = _WORDED["scale"]
_SIZE: str = _WORDED["size"]  # bounded: a line of digits is read in time in proportion to it
_FIGURES = {
    key: re.compile("|".join(patterns).replace("{size}", _SIZE))
    for key, patterns in _WORDED["figures"].items()
}
_DEVICE = re.compile(r"\b(?:GPU|NPU|XPU) (\d{1,6})(?:;| has a total)")
_OTHER = re.compile(rf"Process \d{{1,20}} has {_SIZE} memory in use")
# WSL's driver says 2^64 bytes of a process that it does not know (17179869184.00 GiB).
_MAX_TIMES_DEVICE = 16
_CONTEXT_BYTES = GIB  # more than any known: 760 MiB on an H200 (docs/accuracy.md)


@dataclass(frozen=True)
class AllocatorMessage:
    """What one says, in bytes by name: `requested_bytes`, and where it says so `total_bytes` and
    `free_bytes` of the `device`, `allocated_bytes` to tensors, `unused_bytes` that the allocator
    holds and no tensor uses, `private_pool_bytes`, `process_bytes` (all that this process holds,
    its context too), `other_bytes` (other processes) and `allowed_bytes` (a limit on the process).
    `torch` are the versions that word it so; `is_cuda` is false of ROCm's, XPU's and NPU's.
    """

    known: Mapping[str, int]
    torch: Versions
    is_cuda: bool

    @property
    def derived(self) -> dict[str, int]:
        """What follows from the figures, where it is not nonsense (on Windows torch may hold more
        than the device has, in the host's memory): what must be freed at least for the request,
        what could be free if this torch freed all, what is held outside of it, what of that this
        process holds beside it (the context, libraries), and the rest, which others do."""
        known = self.known
        held = known.get("allocated_bytes", 0) + known.get("unused_bytes", 0)
        room = min(
            known.get("free_bytes", 0), max(known.get("allowed_bytes", MAX_MEMORY_BYTES) - held, 0)
        )
        found = {"missing_bytes": known["requested_bytes"] - room}
        if known.keys() >= {"allocated_bytes", "process_bytes"}:
            found["beside_bytes"] = known["process_bytes"] - held
        if known.keys() >= {"total_bytes", "free_bytes", "allocated_bytes"}:
            found["could_be_free_bytes"] = known["free_bytes"] + held
            found["outside_bytes"] = known["total_bytes"] - found["could_be_free_bytes"]
            if "other_bytes" not in known and "beside_bytes" in found:
                found["rest_bytes"] = found["outside_bytes"] - found["beside_bytes"]
        return {key: value for key, value in found.items() if value > 0}

    @property
    def sizes(self) -> dict[str, Any]:
        return {**self.known, **self.derived}


def _sizes(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    for match in pattern.finditer(text):
        number, unit = (word for word in match.groups() if word is not None)
        yield int(float(number) * _SCALE[unit])


def read_message(text: str) -> AllocatorMessage | None:
    """The figures of the first message in `text`; None where there is none."""
    sizes = {key: next(_sizes(pattern, text), None) for key, pattern in _FIGURES.items()}
    found = {key: size for key, size in sizes.items() if size is not None}
    if "requested_bytes" not in found:
        return None
    if device := _DEVICE.search(text):
        found["device"] = int(device[1])
    if (reserved := found.pop("reserved_bytes", None)) is not None:
        found["unused_bytes"] = max(reserved - found.get("allocated_bytes", 0), 0)
    if found.get("process_bytes", 0) > _MAX_TIMES_DEVICE * found.get("total_bytes", 0):
        del found["process_bytes"]
    # torch lists processes by number; where none is called "this", the one that holds at least what
    # torch does is (in a container its number is another).
    if listed := list(_sizes(_OTHER, text)):
        held = found.get("allocated_bytes", 0) + found.get("unused_bytes", 0)
        own = [] if "process_bytes" in found else [size for size in listed if size >= held]
        if own:
            found["process_bytes"] = min(own)
        if "process_bytes" in found:
            found["other_bytes"] = sum(listed) - min(own, default=0)
    worded = (w for w in _WORDED["wordings"] if w["words"] in text and w.get("and", "") in text)
    torch = next(map(versions_of, worded), ANY_TORCH)
    return AllocatorMessage(found, torch, "CUDA out of memory" in text)


def ways_out(message: AllocatorMessage, torch: Versions) -> Iterator[str]:
    """What the figures say and advise, most certain first, to whoever has one of these torches."""
    sizes = message.sizes
    requested, missing = sizes["requested_bytes"], sizes.get("missing_bytes", 0)
    total, free = sizes.get("total_bytes", 0), sizes.get("free_bytes")
    slack = noteworthy_bytes(total)
    if requested > sizes.get("allowed_bytes", total or requested):
        yield sentence("larger than the device", sizes)
    elif requested > sizes.get("could_be_free_bytes", requested) >= (free or 0) + slack:
        yield sentence("larger than all", sizes)
    key = "rest" if "process_bytes" in sizes else "outside"
    key = "other" if "other_bytes" in sizes else key
    others = sizes.get(f"{key}_bytes", 0)
    if others > (_CONTEXT_BYTES if key == "outside" else slack):
        enough = ", more than this request lacked" if others >= missing > 0 else ""
        yield sentence(key, sizes, enough=enough)
    if sizes.get("beside_bytes", 0) > _CONTEXT_BYTES:
        yield sentence("beside", sizes)
    if sizes.get("private_pool_bytes"):
        yield sentence("private pools", sizes)
    if message.is_cuda and 0 < missing <= sizes.get("unused_bytes", 0):
        yield from on_fragments(sizes["unused_bytes"], requested, total, torch)
    if "allowed_bytes" in sizes:
        yield sentence("allowed", sizes)
    if missing:
        yield sentence("missing", sizes)
    elif free is not None:
        yield sentence("refused", sizes)


def on_fragments(unused: int, requested: int, total: int, torch: Versions) -> Iterator[str]:
    """A word of what is reserved and unused, with a remedy that this torch has."""
    if unused >= noteworthy_bytes(total):
        remedies = filter(None, (remedy.told(torch) for remedy in ON_FRAGMENTS))
        yield sentence(
            "fragments",
            {"unused_bytes": unused},
            more=f"{'more' if unused >= requested else 'less'} than the request",
            remedy=next(remedies, sentence("no remedy")),
        )
