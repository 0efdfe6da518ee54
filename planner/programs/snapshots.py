"""A snapshot of torch's caching allocator: its pickle read safely, and what it says: what is alive,
who asked for it, what is free and why a request failed."""

import io
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from planner.core.errors import MAX_SHOWN, PlannerError
from planner.core.failures import TEXTS
from planner.core.units import MAX_MEMORY_BYTES, MIB, format_bytes

SNAPSHOT_ENDINGS = (".pickle", ".pkl")
MAX_SNAPSHOT_BYTES = 4096 * MIB  # unpacked
Entry = Mapping[str, Any]
Frame = tuple[str, Any, str]  # file, line and function, as Python has them
NO_STACK = "no stack recorded"
MAX_GROUPS = 20
EMULATING = "/planner_site/"  # the folder of what `planner emulate` has a program load
# A list may be in a pickle many times over. With more blocks or events a snapshot was forged.
_MAX_BLOCKS, _MAX_EVENTS = 5_000_000, 20_000_000
# Of torch, or code that torch.compile wrote (torch/_inductor/codecache.py: a hash): torch also
# names the lines that such code came from.
_TORCH = re.compile(r"/torch/|/[a-z2-7]{2}/c[a-z2-7]{51}\.py$")
_MAX_TEXT = 300  # characters of a name


@dataclass(frozen=True)
class Blocks:
    """Blocks that are alive, of one category, requested at one place of the code."""

    category: str
    where: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class SnapshotReading:
    """What a snapshot says of one device: `figures` in bytes and counts by name, and what is alive
    by kind (`categories`) and by place (the largest `groups`).

    `allocated_bytes` are in use or wait for a stream (`waiting_bytes`), `unused_bytes` are free,
    CUDA graphs hold `private_pool_bytes`. Where the history holds a request that failed, it asked
    for `requested_bytes`, and the driver then had `free_bytes`."""

    figures: dict[str, int]
    categories: dict[str, int]
    groups: tuple[Blocks, ...]


def read_pickle(file: IO[bytes], name: str) -> dict[str, Any]:
    """Reads a snapshot that was dumped as `name`. Only plain values are let in, so that a pickle
    from anywhere runs no code. Raises PlannerError and OSError."""
    data = _read_whole(file, name)
    try:
        snapshot = _PlainUnpickler(data).load()
    except Exception as error:  # of damaged ones pickle's manual names no complete list
        raise unreadable(name, f"{type(error).__name__}: {error}"[:MAX_SHOWN]) from None
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise PlannerError(
            f"{name} holds no memory snapshot.",
            "Write one with torch.cuda.memory._dump_snapshot(path).",
        )
    return snapshot


def _read_whole(file: IO[bytes], name: str) -> io.BytesIO:
    data = io.BytesIO()
    while part := file.read(MIB):
        if data.tell() + len(part) > MAX_SNAPSHOT_BYTES:
            raise PlannerError(
                f"{name} is larger than {format_bytes(MAX_SNAPSHOT_BYTES)}.",
                "Record a shorter history: max_entries of _record_memory_history().",
            )
        data.write(part)
    data.seek(0)
    return data


def unreadable(name: str, reason: object) -> PlannerError:
    return PlannerError(
        f"{name} cannot be read as a memory snapshot: {reason}",
        "Write one with torch.cuda.memory._dump_snapshot(path).",
    )


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_snapshot(snapshot: Mapping[str, Any], name: str) -> SnapshotReading:
    """Reads a snapshot for the device that ran out of memory, or else the one that holds most.
    Raises PlannerError where the snapshot, from `name`, is not as torch writes it."""
    try:
        return _read(snapshot["segments"], snapshot["device_traces"])
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise unreadable(name, f"{type(error).__name__}: {error}.") from None


def _size(entry: Entry, key: str = "size") -> int:
    value = entry[key]
    if type(value) is not int or not 0 <= value <= MAX_MEMORY_BYTES:
        raise ValueError(f"its {key!r} is no number of bytes or of a device")
    return value


def _text(entry: Entry, key: str) -> str:
    value = entry.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _read(segments: Sequence[Entry], traces: Sequence[Sequence[Entry]]) -> SnapshotReading:
    if sum(map(len, traces)) > _MAX_EVENTS or sum(len(s["blocks"]) for s in segments) > _MAX_BLOCKS:
        raise ValueError("it has more events or blocks than a process can have made")
    held: Counter[int] = Counter()
    for segment in segments:
        held[_size(segment, "device")] += _size(segment, "total_size")
    failures = [(n, e) for n, trace in enumerate(traces) for e in trace if e["action"] == "oom"]
    fullest = max(held, key=lambda device: held[device], default=0)
    device, failed = failures[-1] if failures else (fullest, None)
    segments = [segment for segment in segments if segment["device"] == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    free = [_size(block) for block in blocks if block["state"] == "inactive"]
    groups = grouped([block for block in blocks if block["state"] != "inactive"])
    categories: Counter[str] = Counter()
    for group in groups:
        categories[group.category] += group.num_bytes
    waiting = [b for b in blocks if b["state"] not in ("inactive", "active_allocated")]
    own = [s for s in segments if s.get("segment_pool_id", (0, 0)) not in ((0, 0), [0, 0])]
    figures = {
        "device": device,
        "reserved_bytes": held[device],
        "allocated_bytes": categories.total(),
        "waiting_bytes": sum(map(_size, waiting)),
        "unused_bytes": sum(free),
        "largest_free_bytes": max(free, default=0),
        "num_free_blocks": len(free),
        "num_segments": len(segments),
        "is_expandable": any(segment.get("is_expandable") for segment in segments),
    }
    if own:
        figures["private_pool_bytes"] = sum(_size(segment, "total_size") for segment in own)
    if failed is not None:  # until torch 2.0 what the driver had is its address
        free_key = "device_free" if "device_free" in failed else "addr"
        free_bytes = _size({"addr": 0, **failed}, free_key)
        figures |= {"requested_bytes": _size(failed), "free_bytes": free_bytes}
    return SnapshotReading(figures, dict(categories.most_common()), tuple(groups[:MAX_GROUPS]))


def alive_at_end(snapshot: Mapping[str, Any], device: int | None = None) -> list[Entry]:
    """The live blocks of a device, or of all devices, with the bytes that were requested."""
    return [
        {**block, "size": block.get("requested_size", block["size"])}
        for segment in snapshot["segments"] if device in (None, segment["device"])
        for block in segment["blocks"] if block["state"] == "active_allocated"
    ]  # fmt: skip


def alive_at_peak(snapshot: Mapping[str, Any], device: int) -> tuple[list[Entry], Entry]:
    """What was alive at the peak, and the request that led to it. The history is read backwards
    from its end, so that it need not hold the program's beginning."""
    segments = (segment for segment in snapshot["segments"] if segment["device"] == device)
    blocks = (block for segment in segments for block in segment["blocks"])
    held = {b["address"]: b for b in blocks if b["state"] == "active_allocated"}
    trace = snapshot["device_traces"][device]
    now = best = sum(block["size"] for block in held.values())
    when = len(trace)
    for index in range(len(trace) - 1, -1, -1):
        event = trace[index]
        if event["action"] == "alloc":
            now -= event["size"]
        elif event["action"] == "free_requested":
            now += event["size"]
            if now > best:
                best, when = now, index
    for event in reversed(trace[when:]):
        if event["action"] == "alloc":
            held.pop(event["addr"], None)
        elif event["action"] == "free_requested":
            held[event["addr"]] = event
    return list(held.values()), next(
        (e for e in reversed(trace[:when]) if e["action"] == "alloc"), {}
    )


def grouped(alive: Iterable[Entry]) -> list[Blocks]:
    """Blocks grouped by the place that requested them, the largest group first."""
    by_place: dict[tuple[str, str], list[int]] = {}
    places: dict[int, tuple[str, str]] = {}  # stacks are shared: each is read once
    for block in alive:
        frames = _frames(block)
        if id(frames) not in places:
            places[id(frames)] = place_of(stack_of(block))
        by_place.setdefault(places[id(frames)], []).append(_size(block))
    groups = [Blocks(*place, sum(sizes), len(sizes)) for place, sizes in by_place.items()]
    return sorted(groups, key=lambda group: -group.num_bytes)


def _frames(entry: Entry) -> Sequence[Entry]:
    """The frames of an entry's stack, innermost first. Before torch 2.1 a block has a history,
    newest first."""
    before: Entry = next(iter(entry.get("history") or ()), {})
    return entry.get("frames") or before.get("frames") or ()


def stack_of(entry: Entry) -> list[Frame]:
    """The Python code that requested a block."""
    frames = _frames(entry)
    return python_frames([(_text(f, "filename"), f.get("line"), _text(f, "name")) for f in frames])


def python_frames(stack: Iterable[Frame]) -> list[Frame]:
    """The frames of Python files, without those that `planner emulate` adds to a program."""
    return [frame for frame in stack if frame[0].endswith(".py") and EMULATING not in frame[0]]


def place_of(stack: Sequence[Frame]) -> tuple[str, str]:
    """(what a block is, where it was requested), from its stack: innermost frame first.

    A stack names code and not modules, so that several modules of one class share a place. Backward
    on a GPU runs in a thread of its own, where Python has no frames.
    """
    frames = [(file.replace("\\", "/"), *rest) for file, *rest in stack]
    if not frames:
        return NO_STACK, "backward, or before the history began"
    files, lines, names = zip(*frames, strict=True)
    at = next((n for n, file in enumerate(files) if not _TORCH.search(file)), 0)
    line = lines[at] if isinstance(lines[at], int) and abs(lines[at]) < 1 << 32 else 0
    return _category(files, names), f"{'/'.join(files[at].split('/')[-2:])}:{line} {names[at]}"


def _category(files: Sequence[str], names: Sequence[str]) -> str:
    for rule in TEXTS["stacks"]:
        end = names.index(rule["before"]) if rule.get("before") in names else None
        is_there = any(rule.get("file", "") in file for file in files[:end])
        if is_there and not set(rule.get("names", names)).isdisjoint(names):
            return str(rule["category"])
    return "other"
