"""Records of several environments beside each other: in what these differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.core.schema import DeviceInfo, MeasurementRecord

_MOST_NAMED = 6


def describe_mixture(records: Sequence[MeasurementRecord]) -> str | None:
    """In what the devices and the software of records differ, as one sentence; None where all are
    of one environment."""
    found = list(_differences(records))
    if not found:
        return None
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"These records are of several environments: {'; '.join(found[:_MOST_NAMED])}{more}."


def _differences(records: Sequence[MeasurementRecord]) -> Iterator[str]:
    devices: list[DeviceInfo] = []
    for record in records:
        if not any(record.device.is_like(other) for other in devices):
            devices.append(record.device)
    if len(devices) > 1:
        yield f"device {', '.join(map(_device, devices))}"
    # A CPU's records have no CUDA to tell: only what both kinds of device know is held together.
    for kind in ("cuda", "cpu"):
        known = [record.versions for record in records if record.device.kind == kind]
        for key in sorted({key for versions in known for key in versions}):
            values = dict.fromkeys(versions.get(key, "none") for versions in known)
            if len(values) > 1:
                yield f"{key} {', '.join(values)}"


def _device(device: DeviceInfo) -> str:
    return f"{device.name} with driver {device.driver}" if device.driver else device.name
