"""The proof: a real training run of the recommended setting, fed by the recommended loader."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from planner.schema import DeviceInfo, MeasurementRecord
from planner.schema.loading import FedRecord, LoaderStatus
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import FedMessage, FedRequest

FED_FILE = "fed.jsonl"


def prove(
    request: FedRequest,
    *,
    predicted: float | None,
    deadline_seconds: float,
    device: DeviceInfo | None = None,
    on_event: Callable[[ProbeEvent], None] | None = None,
    fork_server: ForkServer | None = None,
) -> FedRecord:
    """One fed training of `request` in a process of its own, ended at the deadline. Returns a
    record whatever happens; `predicted` is what the law says of it, in images/s."""
    told: list[FedMessage] = []
    record = run_probe(
        request, deadline_seconds=deadline_seconds, device=device, on_event=on_event,
        on_fed=told.append, fork_server=fork_server,
    )  # fmt: skip
    return make_fed_record(request, record, told[-1] if told else None, predicted)


def make_fed_record(
    request: FedRequest, record: MeasurementRecord, told: FedMessage | None, predicted: float | None
) -> FedRecord:
    """What a probe of a fed training found. Its rate is that of all timed steps together: batches
    come in bursts, and the median step is one that did not wait."""
    samples = record.step_seconds
    images = request.setting.batch_size * request.setting.accumulate
    shared = {} if told is None else told.model_dump(exclude={"format", "type", "probe_id"})
    return FedRecord(
        model=request.model,
        setting=request.setting,
        loader=request.loader,
        data=request.source,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        status=_status(record, told),
        message=record.message,
        step_seconds=samples,
        images_per_second=images * len(samples) / sum(samples) if samples else None,
        predicted=predicted,
        probe_seconds=record.probe_seconds,
        flags=record.flags,
        **shared,
    )


def _status(record: MeasurementRecord, told: FedMessage | None) -> LoaderStatus:
    if told is not None and told.fault is not None:
        return "faulty"
    if record.status == "non_finite":  # of real pictures, where random ones were fine
        return "crashed"
    return record.status


def keep(path: Path, record: FedRecord) -> None:
    """Appends one JSON line, on disk when this returns. Raises OSError."""
    line = record.model_dump_json(exclude_none=True).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "ab", buffering=0) as file:  # noqa: PTH123
        file.write(line)
        os.fsync(file.fileno())


def find_kept(path: Path, request: FedRequest) -> FedRecord | None:
    """The last measured run of the same model, setting, loader and data, in an earlier run of the
    same search. Lines that are none are passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = FedRecord.model_validate_json(line)
        except ValidationError:
            continue
        if record.status == "measured" and _is_of(record, request):
            return record
    return None


def _is_of(record: FedRecord, request: FedRequest) -> bool:
    return (record.model, record.setting, record.loader, record.data) == (
        request.model, request.setting, request.loader, request.source,
    )  # fmt: skip
