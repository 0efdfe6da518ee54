"""A predicted training as a snapshot of torch's allocator, for the tools that read one.

The form is that of `torch.cuda.memory._snapshot()` (torch 2.13, torch/cuda/memory.py, and a dump
of a real one), so that memory_viz opens it; `planner.memory.snapshot` plays it back. Frames say
modules where a real one says code: the operation within its module, then the modules around it.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from planner import __version__
from planner.ledger.ledger import Allocated, Event, Ledger, Marked, Tagged
from planner.memory.allocator_config import NUM_ROUNDUP_INTERVALS, AllocatorConfig
from planner.memory.moves import Move, Moves, Run, allocator_moves

FIRST_ADDRESS = 0x7F00_0000_0000  # where a driver's addresses lie, about; a whole number for a page
WORKSPACE = "workspace"  # what a matrix product's library asks for, beside the ledger's storages
# memory_viz colours by category, and fails where none of an event is called so.
UNKNOWN = "unknown"

Frame = dict[str, Any]


def predicted_snapshot(
    ledger: Ledger,
    workspace_bytes: int,
    config: AllocatorConfig | None = None,
    allowed_bytes: int | None = None,
) -> dict[str, Any]:
    """The snapshot at the end of a predicted training: building the model, the first step, and
    twice the steady one. `time_us` counts events: a snapshot is of an order, not of seconds."""
    moves = allocator_moves(ledger, workspace_bytes, config, allowed_bytes)
    writer = _Writer(ledger.events, moves)
    trace = [entry for move in moves.moves for entry in writer.entries(move)]
    for time, entry in enumerate(trace):
        entry["time_us"] = time
    segments = [writer.segment(run) for run in moves.runs]
    allocated = sum(segment["allocated_size"] for segment in segments)
    trace.append(_entry("snapshot", 0, allocated, 0, [], UNKNOWN, "") | {"time_us": len(trace)})
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": _settings(config or AllocatorConfig()),
        "external_annotations": list(_annotations(trace)),
        "planner": {"version": __version__, "predicted": True},
    }


class _Writer:
    """Names what the moves hold by the events of its ledger."""

    def __init__(self, events: Sequence[Event], moves: Moves) -> None:
        self.moves = moves
        self.events = events
        self.categories = _categories(events)
        self.phases = list(_phases(events, moves.walked.marks))

    def entries(self, move: Move) -> Iterator[dict[str, Any]]:
        """What a snapshot says of a move: a release is two events, requested and completed."""
        frames, category = self.frames(move.entry), self.category(move.entry)
        size = self.moves.requests[move.entry]
        when = self.phase(move)
        if move.action == "free":
            for action in ("free_requested", "free_completed"):
                yield _entry(action, move.address, size, move.stream, frames, category, when)
            return
        num_bytes = size if move.action == "alloc" else move.num_bytes
        yield _entry(move.action, move.address, num_bytes, move.stream, frames, category, when)

    def phase(self, move: Move) -> str:
        """`step 3: backward`, counted from 1; the steady step's second turn is a step more."""
        step, phase = self.phases[self.moves.walked.events[move.cause]]
        return phase if step < 1 else f"step {step + move.again}: {phase}"

    def category(self, entry: int) -> str:
        event = self.moves.walked.events[entry]
        if not isinstance(self.events[event], Allocated):
            return WORKSPACE
        return self.categories.get(event, "temporaries")

    def frames(self, entry: int) -> list[Frame]:
        """Innermost first: the operation in its module, the modules around it, the phase."""
        index = self.moves.walked.events[entry]
        event = self.events[index]
        phase = self.phases[index][1]
        path = getattr(event, "path", "")
        label = event.label if isinstance(event, Allocated) else WORKSPACE
        parts = path.split(".") if path else []
        around = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
        return [
            _frame(path or phase, label),
            *(_frame("module", module) for module in around),
            _frame("phase", phase),
        ]

    def segment(self, run: Run) -> dict[str, Any]:
        blocks = [self.block(run, offset) for offset in sorted([*run.held, *run.free])]
        used = [block for block in blocks if block["state"] == "active_allocated"]
        return {
            "device": 0,
            "address": FIRST_ADDRESS + run.address,
            "total_size": run.num_bytes,
            "allocated_size": sum(block["size"] for block in used),
            "active_size": sum(block["size"] for block in used),
            "requested_size": sum(block["requested_size"] for block in used),
            "stream": run.stream,
            "segment_type": "small" if run.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": self.moves.is_expandable,
            "frames": [],
            "blocks": blocks,
        }

    def block(self, run: Run, address: int) -> dict[str, Any]:
        held = run.held.get(address)
        if held is None:
            size, requested, state = run.free[address], 0, "inactive"
            return _block(address, size, requested, state, [])
        requested = self.moves.requests[held.entry]
        block = _block(
            address, held.num_bytes, requested, "active_allocated", self.frames(held.entry)
        )
        return block | {"category": self.category(held.entry)}


def _entry(
    action: str, address: int, size: int, stream: int, frames: list[Frame], category: str, when: str
) -> dict[str, Any]:  # fmt: skip
    entry = {
        "action": action,
        "addr": FIRST_ADDRESS + address if action != "snapshot" else 0,
        "size": size,
        "stream": stream,
        "frames": frames,
        "category": category,
    }
    return entry | {"user_metadata": when} if when else entry


def _block(
    address: int, size: int, requested: int, state: str, frames: list[Frame]
) -> dict[str, Any]:
    return {
        "address": FIRST_ADDRESS + address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def _frame(where: str, name: str) -> Frame:
    return {"name": name, "filename": where, "line": 0}


def _categories(events: Sequence[Event]) -> dict[int, str]:
    """By the index of an allocation, what its storage is for: activations are temporaries too, once
    backward has used them."""
    found: dict[int, str] = {}
    alive: dict[int, int] = {}
    for index, event in enumerate(events):
        if type(event) is Allocated:
            alive[event.storage] = index
        elif type(event) is Tagged and event.storage in alive and event.category != "temporaries":
            found[alive[event.storage]] = event.category
    return found


def _phases(
    events: Sequence[Event], marks: Sequence[tuple[int, Marked]]
) -> Iterator[tuple[int, str]]:
    """Of each event its step, counted from 1 (0 is building the model), and its phase."""
    done = 0
    for end, mark in marks:
        step = 0 if mark.phase == "build" else mark.step + 1
        for _ in range(done, end + 1):
            yield step, mark.phase
        done = end + 1
    for _ in range(done, len(events)):
        yield 0, ""


def _annotations(trace: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Where each phase begins and ends, as `record_function` leaves it in a snapshot."""
    name, end = "", 0
    for entry in trace:
        now = entry.get("user_metadata", "")
        if now != name:
            if name:
                yield _annotation("END", name, end)
            if now:
                yield _annotation("START", now, entry["time_us"])
            name = now
        end = entry["time_us"]


def _annotation(stage: str, name: str, time: int) -> dict[str, Any]:
    return {"stage": stage, "name": name, "device": 0, "time_us": time}


def _settings(config: AllocatorConfig) -> dict[str, Any]:
    """The allocator's options under the names that a snapshot has for them."""
    divisions = config.roundup_power2_divisions or (0,) * NUM_ROUNDUP_INTERVALS
    limit = config.max_split_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.source,
        "max_split_size": -1 if limit is None else limit,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "roundup_power2_divisions": {str(1 << n): each for n, each in enumerate(divisions)},
    }
