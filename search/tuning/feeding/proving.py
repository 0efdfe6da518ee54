"""The proof: a real training run of the recommended setting, fed by the recommended loader."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from planner.core.schema import DeviceInfo, MeasurementRecord
from planner.core.schema.loading import FedRecord, LoaderStatus
from search.loop.study.records import read_records
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import FedMessage, FedRequest


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
        images_per_second=(
            request.images_per_step * len(samples) / sum(samples) if samples else None
        ),
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


def find_kept(path: Path, request: FedRequest) -> FedRecord | None:
    """The last measured run of the same model, setting, loader and data, in an earlier run of the
    same search. Raises PlannerError where the file cannot be read."""
    for record in reversed(read_records(path, FedRecord).records):
        if record.status == "measured" and _is_of(record, request):
            return record
    return None


def _is_of(record: FedRecord, request: FedRequest) -> bool:
    return (record.model, record.setting, record.loader, record.data) == (
        request.model, request.setting, request.loader, request.source,
    )  # fmt: skip
