"""A step's allocator history, kept small beside the records."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.memory.snapshot import replay_snapshot
from search.probe.observation.order import Order, Teller
from search.probe.observation.subject import Subject
from search.probe.observation.view import CudaView, NotHereError, View
from search.probe.worker.history import record_history

# A step of Swin-B is some 10,000 events of about 100 bytes each, a tenth of that once compressed
# (inferred); what is much larger is no record of one step.
MAX_FILE_BYTES = 8 * 1024**2
# What our allocator needs of an event, and of a segment.
_EVENT_FIELDS = ("action", "addr", "size", "stream")
_SEGMENT_FIELDS = (
    "device", "address", "total_size", "stream", "segment_type", "segment_pool_id",
    "is_expandable",
)  # fmt: skip
_BLOCK_FIELDS = ("address", "size", "requested_size", "state")


def see_snapshot(order: Order, view: View, tell: Teller) -> None:
    """The history of one steady step, kept as a file, and where our allocator leaves it."""
    if not isinstance(view, CudaView):
        raise NotHereError("the CPU's allocator keeps no history")
    subject = Subject(order.observation, order.device)
    view.start()
    subject.prepare()
    training = subject.training()
    training.step()
    snapshot = record_history(view.device, training.step)
    small = stripped(snapshot, view.device.index or 0)
    path = Path(order.folder) / f"{order.observation.name}.pickle.gz"
    tell.see(file=path.name, file_bytes=keep_snapshot(small, path))
    tell.see(**replayed(small))


def stripped(snapshot: dict[str, Any], device: int) -> dict[str, Any]:
    """Only what a replay needs: no stacks, no other device, no names of files."""
    segments = [
        {
            **_chosen(segment, _SEGMENT_FIELDS),
            "device": 0,
            "blocks": [_chosen(block, _BLOCK_FIELDS) for block in segment["blocks"]],
        }
        for segment in snapshot["segments"]
        if segment["device"] == device
    ]
    return {
        "segments": segments,
        "device_traces": [[_chosen(e, _EVENT_FIELDS) for e in snapshot["device_traces"][device]]],
        "allocator_settings": snapshot.get("allocator_settings") or {},
    }


def _chosen(entry: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: entry[field] for field in fields if field in entry}


def keep_snapshot(snapshot: dict[str, Any], path: Path) -> int:
    """Write it compressed; its size in bytes. Raises PlannerError for one that is too large."""
    data = gzip.compress(pickle.dumps(snapshot, protocol=4), mtime=0)
    if len(data) > MAX_FILE_BYTES:
        raise PlannerError(f"the snapshot takes {len(data)} bytes, over {MAX_FILE_BYTES}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return len(data)


def replayed(snapshot: dict[str, Any]) -> dict[str, Any]:
    """What our allocator makes of the recorded requests."""
    try:
        found = replay_snapshot(snapshot)
    except PlannerError as error:
        return {"replay": str(error)}
    return {
        "replay": found.difference or "equal",
        "num_requests": found.num_requests,
        "replayed_peak_allocated_bytes": found.peak_allocated_bytes,
        "replayed_peak_reserved_bytes": found.peak_reserved_bytes,
        "recorded_reserved_bytes": found.recorded_reserved_bytes,
    }
