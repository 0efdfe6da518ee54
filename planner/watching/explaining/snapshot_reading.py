"""What a snapshot of torch's caching allocator says: what is alive, who asked for it, what is free
and why a request failed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.core.errors import PlannerError
from planner.core.failures import ANY_TORCH, SAID, sentence
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import MAX_MEMORY_BYTES
from planner.watching.explaining.allocator_message import on_fragments

Entry = Mapping[str, Any]
NO_STACK = "no stack recorded"
MAX_GROUPS = 20
# Lists may be in a snapshot many times over: of more blocks and events it was forged.
_MAX_BLOCKS, _MAX_EVENTS = 5_000_000, 20_000_000
_COMPILED = re.compile(r"/[a-z2-7]{2}/c[a-z2-7]{51}\.py$")  # torch/_inductor/codecache.py: a hash
_MAX_FRAMES, _MAX_TEXT = 1024, 300  # of a stack that are looked at, and characters of a name


@dataclass(frozen=True)
class Group:
    """Blocks that are alive and were asked for in one place."""

    category: str
    where: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class SnapshotReading:
    """Bytes of one device. `allocated_bytes` are blocks that are in use or wait for a stream,
    `private_pool_bytes` what CUDA graphs hold, `largest_free_bytes` the largest block that is
    free; `requested_bytes` the request that failed, where the history holds it, and
    `device_free_bytes` what the driver had then."""

    computed = ("missing_bytes",)
    device: int
    reserved_bytes: int
    allocated_bytes: int
    waiting_bytes: int
    free_bytes: int
    largest_free_bytes: int
    num_free_blocks: int
    num_segments: int
    is_expandable: bool
    private_pool_bytes: int
    requested_bytes: int | None
    device_free_bytes: int | None
    categories: dict[str, int]
    groups: tuple[Group, ...]

    @property
    def has_stacks(self) -> bool:
        return any(group.category != NO_STACK for group in self.groups)

    @property
    def missing_bytes(self) -> int | None:
        if self.requested_bytes is None:
            return None
        return max(self.requested_bytes - (self.device_free_bytes or 0), 1)

    def ways_out(self) -> Iterator[str]:
        sizes, unused = asdict(self), self.free_bytes
        if self.is_expandable and unused >= noteworthy_bytes(self.reserved_bytes):
            yield sentence("expandable already", {"unused_bytes": unused})
        elif unused >= (self.missing_bytes or 0):
            requested = self.requested_bytes or 0
            yield from on_fragments(unused, requested, self.reserved_bytes, ANY_TORCH)
        if self.private_pool_bytes:
            yield sentence("private pools", sizes)
        if self.waiting_bytes:
            yield sentence("waiting", sizes)


def read_snapshot(snapshot: Mapping[str, Any]) -> SnapshotReading:
    """The device that ran out of memory, or else the one that holds most. Raises PlannerError."""
    try:
        device, failed = _choose(snapshot)
        return _read(snapshot["segments"], device, failed)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise PlannerError(
            f"the snapshot is not as torch writes it: {type(error).__name__}: {error}.",
            "Write one with torch.cuda.memory._dump_snapshot(path).",
        ) from None


def _size(entry: Entry, key: str) -> int:
    value = entry[key]
    if type(value) is not int or not 0 <= value <= MAX_MEMORY_BYTES:
        raise ValueError(f"its {key!r} is no number of bytes or of a device")
    return value


def _text(value: object) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _choose(snapshot: Mapping[str, Any]) -> tuple[int, Entry | None]:
    traces, segments = snapshot["device_traces"], snapshot["segments"]
    if sum(map(len, traces)) > _MAX_EVENTS or sum(len(s["blocks"]) for s in segments) > _MAX_BLOCKS:
        raise ValueError("it has more events or blocks than a process can have made")
    found = None
    for device, trace in enumerate(traces):
        for entry in trace:
            if entry["action"] == "oom":
                found = device, entry
    if found is not None:
        return found
    held: Counter[int] = Counter()
    for segment in segments:
        held[_size(segment, "device")] += _size(segment, "total_size")
    return max(held, key=lambda device: held[device], default=0), None


def _read(all_segments: Sequence[Entry], device: int, failed: Entry | None) -> SnapshotReading:
    segments = [s for s in all_segments if _size(s, "device") == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    free = [_size(block, "size") for block in blocks if block["state"] == "inactive"]
    alive = [block for block in blocks if block["state"] != "inactive"]
    groups = _grouped(alive)
    categories: Counter[str] = Counter()
    for group in groups:
        categories[group.category] += group.num_bytes
    free_key = "device_free" if failed and "device_free" in failed else "addr"
    return SnapshotReading(
        device=device,
        reserved_bytes=sum(_size(s, "total_size") for s in segments),
        allocated_bytes=sum(group.num_bytes for group in groups),
        waiting_bytes=sum(_size(b, "size") for b in alive if b["state"] != "active_allocated"),
        free_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        num_free_blocks=len(free),
        num_segments=len(segments),
        is_expandable=any(s.get("is_expandable") for s in segments),
        private_pool_bytes=sum(
            _size(s, "total_size")
            for s in segments
            if s.get("segment_pool_id", (0, 0)) not in ((0, 0), [0, 0])
        ),
        requested_bytes=_size(failed, "size") if failed else None,
        device_free_bytes=_size(failed, free_key) if failed and free_key in failed else None,
        categories=dict(categories.most_common()),
        groups=tuple(groups[:MAX_GROUPS]),
    )


def _grouped(alive: Iterable[Entry]) -> list[Group]:
    found: dict[tuple[str, str], list[int]] = {}
    places: dict[int, tuple[str, str]] = {}  # stacks are shared: each is read once
    for block in alive:
        frames = _frames(block)
        if "category" in block and frames:  # predicted: it says its module and operation
            where = f"{_text(frames[0].get('filename'))} ({_text(frames[0].get('name'))})"
            place = _text(block["category"]).replace("_", " "), where
        else:
            place = places.get(id(frames)) or places.setdefault(id(frames), place_of(frames))
        found.setdefault(place, []).append(_size(block, "size"))
    groups = [Group(*place, sum(sizes), len(sizes)) for place, sizes in found.items()]
    return sorted(groups, key=lambda group: -group.num_bytes)


def _frames(block: Entry) -> Sequence[Entry]:
    """Innermost first. Before torch 2.1 a block has a history, newest first."""
    frames = block.get("frames")
    if frames is None:
        history = block.get("history") or ()
        frames = history[0].get("frames") if history else None
    return frames or ()


def place_of(frames: Sequence[Entry]) -> tuple[str, str]:
    """(what a block is, where it was asked for), from its stack: innermost frame first.

    A stack tells code and not modules, so that blocks of one kind that run the same line are one
    place. Backward of a GPU runs in a thread of its own, where Python has no frames.
    """
    known = [f for f in frames[:_MAX_FRAMES] if _text(f.get("filename")).endswith(".py")]
    if not known:
        return NO_STACK, "backward, or before the history began"
    theirs = [frame for frame in known if not _is_torch(frame)]
    return _category(known), _shown((theirs or known)[0])


def _category(frames: Sequence[Entry]) -> str:
    names = [_text(frame.get("name")) for frame in frames]
    files = [_text(frame["filename"]).replace("\\", "/") for frame in frames]
    for rule in SAID["stacks"]:
        end = names.index(rule["before"]) if rule.get("before") in names else None
        is_there = any(rule.get("file", "") in file for file in files[:end])
        if is_there and not set(rule.get("names", names)).isdisjoint(names):
            return str(rule["category"])
    return "other"


def _is_torch(frame: Entry) -> bool:
    """Or code that torch.compile wrote: torch also names the lines that it came from."""
    file = _text(frame["filename"]).replace("\\", "/")
    return "/torch/" in file or _COMPILED.search(file) is not None


def _shown(frame: Entry) -> str:
    parts = _text(frame["filename"]).replace("\\", "/").split("/")
    line = frame.get("line", 0)
    number = line if isinstance(line, int) and abs(line) < 1 << 32 else 0
    return f"{'/'.join(parts[-2:])}:{number} {_text(frame.get('name'))}"
