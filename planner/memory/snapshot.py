"""A device's own record of its allocator, laid beside our allocator, event by event.

The record is what `torch.cuda.memory._dump_snapshot(path)` writes after
`torch.cuda.memory._record_memory_history()`: every request, release and segment with its address,
and all blocks at the end. The state before the first recorded event is worked out backwards from
the end, so that recording may begin at any time. Ours is then played forward with the recorded
requests and must give each of them the address that the device gave.

`python -m planner.memory.snapshot FILE` compares; the exit status is 1 where they differ.
"""

from __future__ import annotations

import gzip
import io
import pickle
import sys
import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from planner.core.errors import MAX_SHOWN, PlannerError, UnsupportedError
from planner.core.units import MIB, format_bytes
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNIT_BITS,
    Block,
    CachingAllocator,
    rounded,
)

Entry = Mapping[str, Any]
_NO_ADDRESS = 1 << 64
SNAPSHOT_ENDINGS = (".pickle", ".pkl")
MAX_SNAPSHOT_BYTES = 4096 * MIB  # unpacked
# What its values take of Python's memory, per byte of a pickle: 8 to 9 for torch's (measured on
# CPython 3.11, 100,000 events). A few bytes of a forged one ask for 4 GiB.
_BYTES_PER_BYTE, _FLOOR_BYTES = 24, 256 * MIB


@dataclass(frozen=True)
class SnapshotReplay:
    """How far ours and the device's allocator agreed. Sizes in bytes.

    `difference` says where they first parted, or is empty. `peak_reserved_bytes` and
    `reserved_bytes` are ours, `recorded_reserved_bytes` what the device held at the end. Where
    addresses were not followed, only these totals are compared.
    """

    num_requests: int
    num_releases: int
    num_segments: int
    held_before_bytes: int
    reserved_bytes: int
    recorded_reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    difference: str


def load_snapshot(path: Path) -> dict[str, Any]:
    """Read a dumped snapshot. A name that ends in .gz is of a compressed one. Raises
    PlannerError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return read_pickle(cast("IO[bytes]", file), str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(str(path), error) from None


def read_pickle(file: IO[bytes], name: str) -> dict[str, Any]:
    """A snapshot that was dumped as `name`. It is made of plain values, and nothing else is let in:
    reading a pickle from elsewhere runs no code, and takes memory in proportion to its length only.
    Raises PlannerError, OSError."""
    data = _read_whole(file, name)
    size = format_bytes(len(data.getbuffer()))
    try:
        with _memory_limited(_BYTES_PER_BYTE * len(data.getbuffer()) + _FLOOR_BYTES):
            snapshot = _PlainUnpickler(data).load()
    except MemoryError:
        raise _unreadable(name, f"its {size} ask for more memory than they can fill") from None
    except Exception as error:  # of damaged ones pickle's manual names no complete list
        raise _unreadable(name, f"{type(error).__name__}: {error}"[:MAX_SHOWN]) from None
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


@contextmanager
def _memory_limited(num_bytes: int) -> Iterator[None]:
    """Within, the process gets this much more memory at most. Linux only: elsewhere no limit."""
    try:
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    limits = [held + num_bytes, *(n for n in (soft, hard) if n != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _unreadable(name: str, reason: object) -> PlannerError:
    return PlannerError(
        f"{name} cannot be read as a memory snapshot: {reason}",
        "Write one with torch.cuda.memory._dump_snapshot(path).",
    )


def replay_snapshot(
    snapshot: Mapping[str, Any], *, device: int = 0, follow_addresses: bool = True
) -> SnapshotReplay:
    """Play a recorded history through our allocator and compare every address.

    With `follow_addresses=False` our segments get invented addresses, as in an estimate: what then
    differs in the totals is what not knowing the driver's addresses costs. Raises UnsupportedError
    for a history in private pools, or begun with expandable segments in use.
    """
    trace = [e for e in snapshot["device_traces"][device] if e["action"] in _ACTIONS]
    segments = [s for s in snapshot["segments"] if s["device"] == device]
    if not any(entry["action"] == "alloc" for entry in trace):
        raise PlannerError(
            f"the snapshot holds no request on device {device}.",
            "Call torch.cuda.memory._record_memory_history() before the step, and dump after it.",
        )
    _check_supported(trace, segments)
    config = _recorded_config(snapshot.get("allocator_settings") or {})
    before = _state_before(trace, segments)
    allocator = _RecordedAllocator(config, before, follow=follow_addresses)
    return _Comparison(allocator, before.streams, follow=follow_addresses).run(trace, segments)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_ACTIONS = frozenset({
    "alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
})  # fmt: skip


def _check_supported(trace: Sequence[Entry], segments: Sequence[Entry]) -> None:
    way_out = "Record one eager training step without CUDA graphs and expandable segments."
    if any(tuple(s.get("segment_pool_id", (0, 0))) != (0, 0) for s in segments):
        raise UnsupportedError("the snapshot has private pools of CUDA graphs.", way_out)
    if any(s.get("is_expandable") for s in segments) or any(
        e["action"] in ("segment_map", "segment_unmap") for e in trace
    ):
        raise UnsupportedError("the snapshot has expandable segments.", way_out)


def _recorded_config(settings: Mapping[str, Any]) -> AllocatorConfig:
    """The options in force while recording, from the snapshot's `allocator_settings`."""
    max_split = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions", {})
    return AllocatorConfig(
        max_split_bytes=max_split if 0 < max_split < 1 << 62 else None,
        roundup_power2_divisions=(tuple(divisions.values()) if any(divisions.values()) else ()),
    )


@dataclass(frozen=True)
class _State:
    """Memory before the first event: segments and live blocks, by address, in bytes, and each
    segment's stream. `streams` are the numbers of all streams, by what the device calls them."""

    segments: dict[int, int]
    blocks: dict[int, int]
    of_segment: dict[int, int]
    streams: dict[int, int]


def _state_before(trace: Sequence[Entry], segments: Sequence[Entry]) -> _State:
    sizes = {s["address"]: s["total_size"] for s in segments}
    of_segment = {s["address"]: s["stream"] for s in segments}
    blocks = _active_blocks(segments)
    requested: dict[int, int] = {}  # of the blocks whose own size is not recorded
    for entry in reversed(trace):
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            blocks.pop(address, None)
            requested.pop(address, None)
        elif action == "free_completed":
            requested[address] = rounded(entry["size"])
        elif action == "segment_alloc":
            if sizes.pop(address, None) is None:
                raise _contradiction(f"the segment taken at {address:#x} is nowhere at the end")
        elif action == "segment_free":
            sizes[address] = entry["size"]
            of_segment[address] = entry["stream"]
    seen = _followed_by(trace, requested)
    whole = _with_remainders(blocks | requested, sizes, seen)
    named = sorted({e["stream"] for e in trace} | set(of_segment.values()))
    return _State(sizes, whole, of_segment, {name: number for number, name in enumerate(named)})


def _followed_by(trace: Sequence[Entry], requested: Mapping[int, int]) -> dict[int, int]:
    """Block held from before -> the nearest address behind it that was given out beside it, which
    is where the block ends if it is no further than an unsplit remainder."""
    held = sorted(requested)
    seen: dict[int, int] = {}
    for entry in trace:
        address = entry["addr"]
        index = bisect_left(held, address)
        if entry["action"] == "alloc" and index:
            block = held[index - 1]
            seen[block] = min(seen.get(block, _NO_ADDRESS), address)
        elif entry["action"] == "free_completed" and held[index : index + 1] == [address]:
            del held[index]
    return seen


def _active_blocks(segments: Sequence[Entry]) -> dict[int, int]:
    """Address -> bytes of the blocks in use. Before torch 2.1 a block does not know its address."""
    blocks = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                blocks[address] = block["size"]
            address += block["size"]
    return blocks


def _with_remainders(
    blocks: dict[int, int], segments: dict[int, int], seen: Mapping[int, int]
) -> dict[int, int]:
    """Give blocks of the large pool the 1 MiB or less behind them that was never split off: no
    free block of that pool is as small, so where less lies between a block and what follows it, it
    is the block's own."""
    starts = sorted(segments)
    addresses = sorted(blocks)
    whole = dict(blocks)
    for address, following in zip(addresses, [*addresses[1:], _NO_ADDRESS], strict=False):
        base = starts[max(bisect_right(starts, address) - 1, 0)] if starts else 0
        if not base <= address < base + segments.get(base, 0):
            raise _contradiction(f"the block at {address:#x} is in no segment")
        end = min(following, base + segments[base], seen.get(address, _NO_ADDRESS))
        gap = end - address - blocks[address]
        if segments[base] != SMALL_SEGMENT_BYTES and gap <= SMALL_BYTES:
            whole[address] += gap
    return whole


def _contradiction(fault: str) -> PlannerError:
    return PlannerError(
        f"the snapshot contradicts itself: {fault}.",
        "Record once more, with stacks off and max_entries above the number of events.",
    )


class _RecordedAllocator(CachingAllocator):
    """Ours, in the state before recording, that puts each segment where the device had it.

    A segment at recorded address A begins at 2A here: the order is kept, and segments that touch
    on the device do not touch here, where touching free blocks would merge.
    """

    def __init__(self, config: AllocatorConfig, before: _State, *, follow: bool) -> None:
        super().__init__(config, num_streams=len(before.streams))
        self.pending: list[Entry] = []  # segments the device has taken and ours not yet
        self.fault = ""
        self.live: dict[int, Block] = {}  # recorded address -> our block
        self._follow = follow
        self._bases: list[int] = []
        addresses = sorted(before.blocks)
        for address, num_bytes in before.segments.items():
            first = bisect_left(addresses, address)
            last = bisect_left(addresses, address + num_bytes)
            blocks = {a: before.blocks[a] for a in addresses[first:last]}
            self._hold(address, num_bytes, blocks, before.streams[before.of_segment[address]])
        self._next_address = 1 << 44

    def recorded_address(self, address: int) -> int:
        """The device's address of one of our blocks, in bytes."""
        base = self._bases[bisect_right(self._bases, address) - 1]
        return (base // 2 + address - base) << UNIT_BITS

    def release_segment(self, address: int) -> bool:
        """Give the segment at a recorded address back; whether it was there and wholly free."""
        base = 2 * (address >> UNIT_BITS)
        for pool in (*self.small, *self.large):
            size = pool.segments.get(base)
            if size is not None and pool.starts.get(base) == size:
                self._release(pool, base, size)
                self._bases.remove(base)
                return True
        return False

    def _hold(self, address: int, num_bytes: int, blocks: dict[int, int], stream: int) -> None:
        """Begin with a segment of the device's, on `stream`, and the blocks in use in it."""
        base = 2 * (address >> UNIT_BITS)
        pool = (self.small if num_bytes == SMALL_SEGMENT_BYTES else self.large)[stream]
        pool.segments[base] = num_bytes >> UNIT_BITS
        insort(self._bases, base)
        self._reserve(pool, num_bytes >> UNIT_BITS)
        self.num_segments += 1
        free_from = 0
        for start, size in [*blocks.items(), (address + num_bytes, 0)]:
            offset = (start - address) >> UNIT_BITS
            if offset > free_from:
                pool.add(base + free_from, offset - free_from)
            if size:
                self.live[start] = base + offset, size >> UNIT_BITS
            free_from = offset + (size >> UNIT_BITS)

    def _new_address(self, units: int) -> int:
        if not self._follow:
            return super()._new_address(units)
        if not self.pending:
            self.fault = f"ours takes a segment of {units << UNIT_BITS} B, the device took none"
            return super()._new_address(units)
        entry = self.pending.pop(0)
        if entry["size"] != units << UNIT_BITS:
            self.fault = (
                f"ours takes a segment of {units << UNIT_BITS} B, the device one of "
                f"{entry['size']} B"
            )
        base: int = 2 * (entry["addr"] >> UNIT_BITS)
        insort(self._bases, base)
        return base


class _Comparison:
    """Plays a trace forward, and stops where the two part."""

    def __init__(
        self, allocator: _RecordedAllocator, streams: Mapping[int, int], *, follow: bool
    ) -> None:
        self._allocator = allocator
        self._streams = streams
        self._follow = follow
        self._held_before = sum(size for _, size in allocator.live.values())
        self._allocated = self._peak_allocated = self._held_before
        self._peak_reserved = allocator.reserved_units
        self._counts = {"alloc": 0, "free_completed": 0, "segment_alloc": 0}

    def run(self, trace: Sequence[Entry], segments: Sequence[Entry]) -> SnapshotReplay:
        difference = ""
        for number, entry in enumerate(trace):
            fault = self._play(entry)
            if fault and self._follow:
                difference = f"event {number} ({entry['action']} of {entry['size']} B): {fault}"
                break
        else:
            difference = self._compare_ends(segments) if self._follow else ""
        allocator = self._allocator
        return SnapshotReplay(
            num_requests=self._counts["alloc"],
            num_releases=self._counts["free_completed"],
            num_segments=self._counts["segment_alloc"],
            held_before_bytes=self._held_before << UNIT_BITS,
            reserved_bytes=allocator.reserved_bytes,
            recorded_reserved_bytes=sum(s["total_size"] for s in segments),
            peak_allocated_bytes=self._peak_allocated << UNIT_BITS,
            peak_reserved_bytes=self._peak_reserved << UNIT_BITS,
            difference=difference,
        )

    def _play(self, entry: Entry) -> str:
        """One event; returns what went otherwise than on the device."""
        action = entry["action"]
        if action in self._counts:
            self._counts[action] += 1
        if action == "alloc":
            return self._request(entry)
        if action == "free_completed":
            block = self._allocator.live.pop(entry["addr"])
            self._allocator.free(block, self._streams[entry["stream"]])
            self._allocated -= block[1]
        elif action == "segment_alloc":
            self._allocator.pending.append(entry)
        elif action == "segment_free" and not self._allocator.release_segment(entry["addr"]):
            return "the device returned a segment that ours does not hold free"
        return ""

    def _request(self, entry: Entry) -> str:
        allocator = self._allocator
        allocator.fault = ""
        block = allocator.allocate(entry["size"], self._streams[entry["stream"]])
        allocator.live[entry["addr"]] = block
        self._allocated += block[1]
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        self._peak_reserved = max(self._peak_reserved, allocator.reserved_units)
        if allocator.fault or not self._follow:
            return allocator.fault
        if allocator.pending:
            return f"the device took a segment of {allocator.pending[0]['size']} B, ours none"
        given = allocator.recorded_address(block[0])
        if given != entry["addr"]:
            return f"ours is at {given:#x}, the device's at {entry['addr']:#x}"
        return ""

    def _compare_ends(self, segments: Sequence[Entry]) -> str:
        """Whether the same blocks of the same size are in use at the end."""
        recorded = _active_blocks(segments)
        ours = {a: size << UNIT_BITS for a, (_, size) in self._allocator.live.items()}
        if ours == recorded:
            return ""
        differing = [a for a in recorded.keys() | ours.keys() if recorded.get(a) != ours.get(a)]
        address = min(differing)
        return (
            f"at the end {len(differing)} blocks differ; the one at {address:#x} has "
            f"{recorded.get(address, 0)} B on the device and {ours.get(address, 0)} B in ours"
        )


def main(arguments: Sequence[str]) -> int:
    """Compare each named snapshot; 1 when any differs."""
    status = 0
    for name in arguments:
        result = replay_snapshot(load_snapshot(Path(name)))
        print(
            f"{name}: {result.num_requests} requests, {result.num_releases} releases, "
            f"{result.num_segments} segments; peak allocated "
            f"{format_bytes(result.peak_allocated_bytes)}, reserved "
            f"{format_bytes(result.reserved_bytes)}: {result.difference or 'equal'}"
        )
        status |= bool(result.difference)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PlannerError as fault:
        sys.exit(f"Error: {fault}")
